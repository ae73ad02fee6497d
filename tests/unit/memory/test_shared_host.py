"""Ranks of one machine share one copy of what has to be converted; its memory is gone when they are."""

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from wandistiller.errors import UsageError
from wandistiller.memory import shared_host

RANK = """
import re, sys, torch
from pathlib import Path
from wandistiller.memory import shared_host
from wandistiller.memory.subjects import stored_subject
from wandistiller.memory.placements import find_placement
from wandistiller.memory.placement import Streamed
from wandistiller.models.stored import TRANSFORMER, inspect_checkpoint

shared_host._folder = lambda: Path(sys.argv[3])
reads = []
stored = inspect_checkpoint(Path(sys.argv[1]), TRANSFORMER)
is_packed = sys.argv[2] == "8 bits"
dtype = torch.bfloat16 if is_packed else torch.float32
subject = stored_subject(stored, dtype, on_read=lambda: reads.append(1))
subject.model.requires_grad_(False)
placement = Streamed(quantise=True) if is_packed else find_placement(sys.argv[2])
placed = placement.attach(subject, torch.device("cpu"))
total = sum(value.double().sum() for value in subject.model.state_dict().values())
print("ready", len(reads), float(total), placed.stream.store.relative_error if is_packed else 0, flush=True)
sys.stdin.readline()
share, inside = 0, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
        inside = "wandistiller-" in line
    elif inside and line.startswith("Pss:"):
        share += int(line.split()[1]) * 1024
print("share", share, flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux's account of shared memory")
@pytest.mark.parametrize("placement", ["cpu", "offload", "8 bits"])
def test_two_ranks_share_one_copy(request, tiny_folder, tmp_path, placement):
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(tiny_folder, subfolder="transformer").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    folder = Path(tempfile.mkdtemp(dir=shared_host._folder()))  # of its own: other tests share memory at the same time
    request.addfinalizer(lambda: shutil.rmtree(folder))
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": tmp_path.name}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "half"), placement, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]

    def ask(word):
        lines = [rank.stdout.readline().split() for rank in ranks]
        assert all(line[0] == word for line in lines), lines
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        return [line[1:] for line in lines]

    ready = ask("ready")
    if placement == "cpu":
        assert sorted(int(reads) > 0 for reads, *_ in ready) == [False, True], "one rank reads, the other maps"
    assert ready[0][1:] == ready[1][1:], "the same values; with 8 bits, the same error"
    shared = model if placement == "cpu" else model.blocks  # what is in no block is on the device
    width = 1 + 2 / 128 if placement == "8 bits" else 4
    converted = sum(p.numel() * width for p in shared.parameters() if p.dtype == torch.bfloat16)
    together = sum(int(share[0]) for share in ask("share"))
    assert 0.9 * converted < together < 1.15 * converted + 2 * 4096
    assert all(rank.wait(timeout=60) == 0 for rank in ranks)
    assert not list(folder.iterdir())


JOBS = """
import os, random, sys, time
from pathlib import Path
import torch
from wandistiller.memory import shared_host

shared_host._folder = lambda: Path(sys.argv[1])
ranks = []
for rank in range(5):
    ranks.append(os.fork())
    if ranks[-1]:
        continue
    os.environ["TORCHELASTIC_RUN_ID"] = f"job {rank % 2}"
    for _ in range(200):
        time.sleep(random.random() / 500)
        weights = shared_host.share("w", {"w": (torch.Size([5000]), torch.int32)}, lambda _: torch.full((5000,), rank % 2))["w"]
        assert (weights == rank % 2).all()
        time.sleep(random.random() / 500)
        shared_host._release()
    os._exit(0)
sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


def test_ranks_of_two_jobs_come_and_go_at_any_moment(tmp_path):
    subprocess.run([sys.executable, "-c", JOBS, str(tmp_path)], check=True, timeout=300)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_job_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_host, "_folder", lambda: tmp_path)
    left = tmp_path / f"{shared_host._prefix()}abc.weights"
    left.write_bytes(b"x")
    held = tmp_path / f"{shared_host._prefix()}def.weights"
    held.write_bytes(b"x")
    shared_host._hold(held)
    unfinished = tmp_path / f"{shared_host._prefix()}ghi.partial"
    unfinished.write_bytes(b"x")
    unfinished.with_suffix(".lock").write_bytes(b"")
    shared_host.remove_abandoned()
    assert not left.exists()
    assert not list(tmp_path.glob("*ghi*")), "of one that was killed while it filled, too"
    assert held.exists()
    shared_host._release()
    assert not held.exists()


def test_too_little_shared_memory_is_said_with_its_place(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_host, "_folder", lambda: tmp_path)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UsageError, match=re.escape(f"Shared memory ({tmp_path}) has room for")) as error:
        shared_host.share("key", {"a": (torch.Size([2**30]), torch.uint8)}, lambda name: torch.zeros(1))
    assert "1.0 GiB are needed" in str(error.value) and "--shm-size" in str(error.value)
    assert not list(tmp_path.glob("*.partial"))
