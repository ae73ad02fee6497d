"""Whatever runs out, the message says where, how much, and what to change, in this run's own numbers and flags."""

import errno
import itertools
import os
import shlex
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from wandistiller import api
from wandistiller.cli.main import parse
from wandistiller.config.command import command_line
from wandistiller.config.sample import SampleConfig
from wandistiller.config.train import TrainConfig
from wandistiller.errors import OutOfRoomError, OutputError
from wandistiller.memory import out_of_memory
from wandistiller.memory.advice import Remedy, enough, in_order
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.out_of_memory import Failure, advising, classify, describe, working_with
from wandistiller.sample import sampler
from wandistiller.train import remedies
from wandistiller.train.methods.finetune import FlowMatching
from wandistiller.units import Bytes

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.6 GiB of which 1.2 GiB is free."
)


def host_error():
    """What PyTorch really raises when the host has no room."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("error", "kind", "asked"),
    [
        (torch.OutOfMemoryError(CUDA_MESSAGE), "device", Bytes.parse("2.5GiB")),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "device", None),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), "device", None),
        (host_error(), "host", Bytes(2**60)),
        (MemoryError(), "host", None),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "disk", None),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "disk", None),
        (OutputError("x could not be written. [Errno 28] No space left on device"), "disk", None),
        (RuntimeError("unable to write to file </torch_9_1>: No space left on device (28)"), "shared", None),
        (
            RuntimeError("worker is killed by signal: Bus error. It is possible that workers are out of shared memory."),
            "shared",
            None,
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"), "shared", None),
    ],
)
def test_what_ran_out(error, kind, asked):
    failure = classify(error)
    assert (failure.kind, failure.asked) == (kind, asked)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), KeyError("x"), OSError(errno.ENOENT, "gone")])
def test_other_errors_are_left_alone(error):
    with pytest.raises(type(error)) as caught, advising("sample", SampleConfig()):
        raise error
    assert caught.value is error


def remedy(name, gib, slowdown):
    return Remedy(changes={name: True}, saves=Bytes(int(gib * 2**30)), slowdown=slowdown)


def test_remedies_are_ordered_by_gigabytes_saved_against_time_lost():
    slow, quick, useless, small = (
        remedy("slow", 10, 3.0),
        remedy("quick", 8, 1.1),
        remedy("useless", 0, 1),
        remedy("small", 1, 1),
    )
    assert in_order([slow, useless, small, quick]) == [quick, small, slow]
    gib = 2**30
    assert enough([quick, small, slow], 5 * gib) == [quick]
    assert enough([quick, small, slow], 8.5 * gib) == [quick, small]
    assert enough([quick, small, slow], 100 * gib) == [quick, small, slow]
    again = remedy("quick", 3, 1.0)
    assert enough([quick, again], 100 * gib) == [quick], "one field is changed once"


@pytest.mark.parametrize(("asked", "is_said"), [(1, False), (40, True)])
def test_remedies_that_are_not_enough_are_said_to_be(asked, is_said):
    failure = Failure("device", Bytes(asked * 2**30), remedies=[remedy("vae_tiling", 3, 1.03)])
    text = str(describe(failure, "sample", SampleConfig(model="tiny"), MemoryError()))
    assert "--vae-tiling: frees 3.0 GiB, hardly slower" in text
    assert ("40.0 GiB are short, which these do not free together: close what else uses the card" in text) == is_said


TRAIN = ["--model", "tiny-random", "--dataset-path", "world:4:1x32x32", "--output-dir", "run"]


@pytest.mark.parametrize("flags", [[], ["--batch-size", "4", "--activation-policy", "none"], ["--weights-dtype", "float32"]])
def test_the_command_to_paste_is_one_that_can_be_run(flags):
    """Remedies that are good one by one may exclude each other, such as 8-bit states and weights in host memory."""
    config = parse("train", [*TRAIN, *flags])
    ways = [changes for changes, _ in remedies._train_ways(config)]
    assert len(ways) > 2
    for order in [ways, ways[::-1], *itertools.permutations(ways[-4:], 2)]:
        found = [Remedy(changes=changes, saves=Bytes(2**30 - number)) for number, changes in enumerate(order)]
        failure = Failure("device", Bytes(2**40), remedies=found)
        line = str(describe(failure, "train", config, MemoryError())).partition("run: ")[2]
        changed = parse("train", shlex.split(line)[2:])
        changed.check()
        assert all(getattr(changed, name) == value for name, value in order[0].items())


def test_the_message_has_the_phase_the_numbers_and_a_command_to_paste(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = SampleConfig(model="tiny", prompt=("a red ball", "it's"), steps=7)
    offload = Remedy(changes={"placement": "offload"}, saves=Bytes(2**34), slowdown=1.25, why="weights in host memory")
    monitor = Monitor([torch.device("cpu")], remedies=lambda failure: [offload])
    with pytest.raises(OutOfRoomError) as caught, advising("sample", config), monitor.phase("denoising", "transformer"):
        raise torch.OutOfMemoryError(CUDA_MESSAGE)
    text = str(caught.value)
    assert text.startswith("Out of GPU memory while denoising, role transformer, rank 1 of 2.")
    assert "2.5 GiB more were asked for" in text
    assert "the host has" in text
    assert "--placement offload: frees 16.0 GiB, about 1.2 times as long (weights in host memory)" in text
    assert """run: wandistiller sample --model tiny --prompt 'a red ball' 'it'"'"'s' --steps 7 --placement offload""" in text
    assert caught.value.exit_code == 1


def test_the_innermost_phase_is_named():
    monitor = Monitor([torch.device("cpu")])
    with (
        pytest.raises(OutOfRoomError, match="while sampling, role vae"),
        advising("sample", SampleConfig()),
        monitor.phase("training", "student"),
        monitor.phase("sampling", "vae"),
    ):
        raise MemoryError


def test_the_role_at_work_is_named_in_a_phase_of_several():
    monitor = Monitor([torch.device("cpu")])
    with (
        pytest.raises(OutOfRoomError, match="while training, role teacher"),
        advising("sample", SampleConfig()),
        monitor.phase("training", "student"),
        working_with("teacher"),
    ):
        raise MemoryError


@pytest.mark.parametrize("error", [ValueError("a shape that cannot be traced"), MemoryError()])
def test_remedies_that_cannot_be_computed_hide_nothing(error, monkeypatch):
    def fail(failure):
        yield remedy("vae_tiling", 3, 1.0)
        raise error

    monitor = Monitor([torch.device("cpu")], remedies=fail)
    with pytest.raises(OutOfRoomError) as caught, advising("sample", SampleConfig()), monitor.phase("denoising"):
        raise torch.OutOfMemoryError(CUDA_MESSAGE)
    assert "Out of GPU memory while denoising." in str(caught.value) and "--vae-tiling" in str(caught.value)
    monkeypatch.setattr("wandistiller.memory.monitor.WARN_FROM", 0.0)
    assert "RAM:" in monitor.line(), "a warning that cannot be written ends no run"


def test_a_run_that_fails_does_not_wait_for_every_remedy(monkeypatch):
    monkeypatch.setattr("wandistiller.memory.monitor.SECONDS_FOR_ADVICE", 0.0)
    monitor = Monitor([torch.device("cpu")], remedies=lambda failure: (remedy("vae_tiling", each, 1.0) for each in count(1)))
    with pytest.raises(OutOfRoomError, match=r"frees 1\.0 GiB"), advising("sample", SampleConfig()), monitor.phase("x"):
        raise torch.OutOfMemoryError(CUDA_MESSAGE)


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "tiny-random", "--prompt", "a", "b c", "--no-vae-tiling", "--output-latent", "--seed", "3"],
        ["--checkpoint", "x y.safetensors", "--cond", "c.safetensors", "--cfg-scale", "1.5", "--offload-to-cpu"],
    ],
)
def test_a_command_line_says_the_configuration_again(flags):
    config = parse("sample", flags)
    words = shlex.split(command_line("sample", config, {}))
    assert words[:2] == ["wandistiller", "sample"]
    assert parse("sample", words[2:]) == config


def test_a_command_line_under_torchrun(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    line = command_line("sample", SampleConfig(model="tiny"), {"steps": 3})
    launch = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=first:29500 --nproc-per-node=4"
    assert line == f"{launch} -m wandistiller sample --model tiny --steps 3"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize(
    ("place", "flags", "expected"),
    [
        ("denoise", {"batch_size": 4}, ["while denoising, role transformer", "--batch-size 2"]),
        ("write", {"width": 512, "height": 512}, ["while decoding and writing, role vae", "--vae-tiling"]),
    ],
)
def test_sampling_that_runs_out_of_memory(tmp_path, monkeypatch, place, flags, expected, error):
    """A run on the CPU computes in host memory, so the same helps there."""

    def fail(*args, **kwargs):
        raise error(CUDA_MESSAGE)

    monkeypatch.setattr(sampler, place, fail)
    with pytest.raises(OutOfRoomError) as caught:
        api.sample(model="tiny-random", prompt="x", steps=1, output=tmp_path / "x.png", **flags)
    for text in expected:
        assert text in str(caught.value)


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x.png"))

    monkeypatch.setattr("PIL.Image.Image.save", full)
    with pytest.raises(OutOfRoomError, match="The disk is full while decoding and writing") as caught:
        api.sample(model="tiny-random", prompt="x", steps=1, output=tmp_path / "x.png")
    assert f"{tmp_path} has" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_that_no_error_names(tmp_path):
    """What ``write`` raises has no file's name, and one that saves a state wraps it."""
    config = SampleConfig(output=tmp_path / "new" / "x.png")
    with pytest.raises(OutOfRoomError, match="The disk is full") as caught, advising("sample", config):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise OutputError("x could not be written.") from error
    assert f"{tmp_path} has" in str(caught.value)


def test_locks_of_processes_are_in_shared_memory():
    """The error has no file's name; it comes from within that module."""
    with pytest.raises(OSError) as caught:
        exec("raise OSError(28, 'No space left on device')", {"__name__": "multiprocessing.synchronize"})
    assert classify(caught.value).kind == "shared"


def test_shared_memory_that_is_full_is_no_full_disk():
    config = TrainConfig(model="tiny", dataset_path="world:4", workers=3)
    with pytest.raises(OutOfRoomError, match="Out of shared memory") as caught, advising("train", config):
        raise RuntimeError("unable to write to file </torch_9_1>: No space left on device (28)")
    assert "/dev/shm has" in str(caught.value) and "--shm-size" in str(caught.value)
    assert "--workers 0" in str(caught.value)


def test_the_command_to_paste_goes_on_where_a_state_is_saved(tmp_path, monkeypatch):
    """Its changes are such that the state is still of use."""
    monkeypatch.chdir(tmp_path)
    steps = []

    def fail(self, batch, plain=FlowMatching.losses):
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        return plain(self, batch)

    monkeypatch.setattr(FlowMatching, "losses", fail)
    flags = [*TRAIN, "--num-steps", "3", "--batch-size", "2", "--save-every", "1", "--workers", "0"]
    with pytest.raises(OutOfRoomError) as caught:
        api.train(parse("train", flags))
    line = str(caught.value).rpartition("run: ")[2]
    changed = parse("train", shlex.split(line)[2:])
    assert changed.resume == "auto"
    assert api.train(changed).step == 3


def test_host_memory_that_runs_out_for_real(tmp_path):
    """A process that may not have the memory that it needs: what PyTorch raises, and what the user reads."""
    code = (
        "import torch, sys\n"
        "from wandistiller.cli.main import main\n"
        "from wandistiller.sample import sampler\n"
        "sampler.denoise = lambda *a, **k: torch.ones(2**36)\n"
        f"sys.exit(main(['sample', '--model', 'tiny-random', '--prompt', 'x', '--output', '{tmp_path}/x.png']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: Out of host memory while denoising, role transformer." in done.stderr
    assert "256.0 GiB more were asked for" in done.stderr
    assert "Traceback" not in done.stderr


TWO_RANKS = """
import sys, torch, torch.distributed as dist
from wandistiller import api
from wandistiller.cli import main as cli
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.advice import Remedy
from wandistiller.units import Bytes

def sample(config):
    dist.init_process_group("gloo")
    monitor = Monitor([torch.device("cpu")], lambda failure: [Remedy(changes={"batch_size": 2}, saves=Bytes(2**30))])
    from wandistiller.memory.out_of_memory import advising
    with advising("sample", config), monitor.phase("denoising", "transformer"):
        dist.barrier()
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
        dist.all_reduce(torch.zeros(1))  # waits for a rank that will not come

api.sample = sample
sys.exit(cli.main(["sample", "--model", "tiny-random", "--prompt", "x", "--batch-size", "4"]))
"""


def test_one_of_two_ranks_ends_the_job_in_seconds_with_its_advice(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(TWO_RANKS)
    environment = {**os.environ, "PYTHONPATH": str(Path(out_of_memory.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    start = time.monotonic()
    # Without the ending of its own, rank 0 would wait for half an hour; what is asserted is that it does not.
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    print(f"{time.monotonic() - start:.1f} s", done.stderr)
    assert done.returncode == 1
    assert "error: Out of GPU memory while denoising, role transformer, rank 1 of 2." in done.stderr
    command = "torchrun --nproc-per-node=2 -m wandistiller sample --model tiny-random --prompt x --batch-size 2"
    assert done.stderr.count(command) == 2, "once from the rank itself, once as the root cause that torchrun shows"
