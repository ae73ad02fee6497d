"""Ranks of one machine share one copy of what has to be converted; its memory is gone when they are."""

import errno
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.ranks import start_ranks

from wandistiller.errors import UsageError
from wandistiller.memory import shared_host
from wandistiller.memory.placement import Streamed
from wandistiller.memory.placements import find_placement
from wandistiller.memory.subjects import stored_subject
from wandistiller.models.stored import TRANSFORMER, inspect_checkpoint


def share_one_copy(folder, model, placement, ends):
    """Say what was read and what it is, then how much of the memory that ranks share is this one's."""
    shared_host._folder = lambda: folder
    end, reads = ends[int(os.environ["RANK"])], []
    is_packed = placement == "8 bits"
    dtype = torch.bfloat16 if is_packed else torch.float32
    subject = stored_subject(inspect_checkpoint(model, TRANSFORMER), dtype, on_read=lambda: reads.append(1))
    subject.model.requires_grad_(False)
    placed = (Streamed(quantise=True) if is_packed else find_placement(placement)).attach(subject, torch.device("cpu"))
    total = sum(value.double().sum() for value in subject.model.state_dict().values())
    end.send((bool(reads), float(total), placed.stream.store.relative_error if is_packed else 0))
    end.recv()
    share, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "wandistiller-" in line
        elif inside and line.startswith("Pss:"):
            share += int(line.split()[1]) * 1024
    end.send(share)
    end.recv()
    shared_host._release()  # as at the end of a process that is not a test's


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux's account of shared memory")
@pytest.mark.parametrize("placement", ["cpu", "offload", "8 bits"])
def test_two_ranks_share_one_copy(request, tiny_folder, tmp_path, placement):
    model = WanTransformer3DModel.from_pretrained(tiny_folder, subfolder="transformer").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    folder = Path(tempfile.mkdtemp(dir=shared_host._folder()))  # of its own: other tests share memory at the same time
    request.addfinalizer(lambda: shutil.rmtree(folder))
    here, there = zip(*(multiprocessing.Pipe() for _ in range(2)), strict=True)
    ranks = start_ranks(2, share_one_copy, folder, tmp_path / "half", placement, there, folder=tmp_path)

    def ask():
        found = [end.recv() for end in here if end.poll(60)]
        for end in here:
            end.send("go on")
        return found

    (is_read, *values), (is_read_too, *values_too) = ask()
    if placement == "cpu":
        assert {is_read, is_read_too} == {False, True}, "one rank reads, the other maps"
    assert values == values_too, "the same values; with 8 bits, the same error"
    shared = model if placement == "cpu" else model.blocks  # what is in no block is on the device
    width = 1 + 2 / 128 if placement == "8 bits" else 4
    converted = sum(p.numel() * width for p in shared.parameters() if p.dtype == torch.bfloat16)
    assert 0.9 * converted < sum(ask()) < 1.15 * converted + 2 * 4096
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
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
