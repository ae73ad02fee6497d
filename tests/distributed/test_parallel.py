"""Ranks that hold the whole model, or slices of it, against one: the same losses; and states that any of them goes on from."""

import json
import os
import shutil

import pytest
import torch
from helpers.metrics import comparable
from helpers.ranks import run_ranks
from helpers.torchrun import torchrun
from safetensors.torch import load_file

from wandistiller.api import distill, train, train_vae
from wandistiller.checkpoint.training_state import is_complete, load_state
from wandistiller.errors import UsageError

# On one worker: most compare with the same few runs.
pytestmark = pytest.mark.xdist_group("parallel")
STEPS = 20
SIZE = {"width": 32, "height": 32, "max_aspect": 1.0, "learning_rate": 1e-3, "log_every": 1, "workers": 0, "num_steps": STEPS}
PICTURES = {"dataset_path": "world:12:1x32x32", "frames": (1,)}
CRITIC = {"gan_training": True, "critic_width": 4, "gan_start": 1, "r1_interval": 4, "kl_beta": 1e-2, "statistics_samples": 2}
JOBS = {
    "train": (train, {"model": "tiny-random", **PICTURES, **SIZE, "use_ema": True}),
    "distill": (distill, {"teacher_path": "tiny-random", **PICTURES, **SIZE, "feature_weight": 0.5}),
    "train-vae": (train_vae, {"model": "tiny-random", **PICTURES, **SIZE, **CRITIC, "clip_norm": 0.5, "learning_rate": 1e-4}),
}
FSDP, DDP = {"parallel": "fsdp"}, {"parallel": "ddp"}
HSDP = {"parallel": "hsdp", "shard_size": 2}
GLOBAL_BATCH = 4


def job(name, options):
    command, own = JOBS[name]
    command(**{**own, **options})


def run(name, ranks, folder, **options):
    """Train on so many ranks; the samples of a step are the same for any number."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {"batch_size": GLOBAL_BATCH // ranks, "output_dir": folder, **options}
    run_ranks(ranks, job, name, options, folder=folder)
    return folder


def curve(folder):
    """Return what each step's losses and norms were."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [[value for name, value in line.items() if name.endswith(("loss", "gradient_norm"))] for line in lines]


def weights(folder):
    return load_file(next(folder.glob("*/transformer/*.safetensors"), None) or next(folder.glob("vae/*.safetensors")))


def assert_same(name, found, expected):
    # A critic makes rounding grow from step to step: the norm of its gradients first.
    rel = 2e-3 if name == "train-vae" else 1e-4
    for step, (mine, theirs) in enumerate(zip(curve(found), curve(expected), strict=True), start=1):
        assert mine == pytest.approx(theirs, rel=rel, abs=1e-5), step
    ours, others = weights(found), weights(expected)
    assert ours.keys() == others.keys()
    for key, value in others.items():
        # Adam makes much of the rounding of gradients that are nearly zero.
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=5e-4, msg=key)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a run on one rank, made once."""
    found = {}

    def make(name):
        if name not in found:
            found[name] = run(name, 1, tmp_path_factory.mktemp("one") / name)
        return found[name]

    return make


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("ranks", "how"), [(2, FSDP), (4, DDP), (4, HSDP)], ids=["fsdp2", "ddp4", "hsdp4"])
def test_any_kind_of_ranks_is_one_with_the_same_global_batch(alone, tmp_path, name, ranks, how):
    assert_same(name, run(name, ranks, tmp_path / "run", **how), alone(name))


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Return the state of a run that four ranks with slices have stopped half-way."""
    found = {}

    def make(name):
        if name not in found:
            folder = tmp_path_factory.mktemp("half") / name
            found[name] = run(name, 4, folder, **FSDP, num_steps=STEPS // 2, save_every=4)
        return found[name]

    return make


@pytest.mark.parametrize(
    ("name", "ranks", "how"),
    [("train", 1, {}), ("train", 1, FSDP), ("train", 2, FSDP), ("train", 2, DDP), ("train-vae", 1, {}), ("distill", 2, HSDP)],
    ids=lambda value: value if isinstance(value, (str, int)) else value.get("parallel", "alone"),
)
def test_a_state_of_four_slices_goes_on_anywhere(alone, half, tmp_path, name, ranks, how):
    """Straight to the end on one rank, or half-way on four and the rest on others: the same losses."""
    shutil.copytree(half(name), tmp_path / "run")
    parts = {"batch_size": 1, "gradient_accumulation": GLOBAL_BATCH // ranks}
    assert_same(name, run(name, ranks, tmp_path / "run", **parts, **how, resume="auto"), alone(name))


def test_ranks_write_a_state_together_and_each_piece_once(half):
    states = sorted((half("train") / "states").iterdir())
    assert [path.name for path in states] == ["step-00000008", "step-00000010"]
    files = sorted(states[-1].glob("*.safetensors"))
    assert len(files) == 4
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.5 * min(sizes), "each writes its share"
    tensors = load_state(states[-1]).tensors
    whole = sum(value.nbytes for value in tensors.values())
    assert whole <= sum(sizes) < 1.3 * whole


def test_a_state_without_all_of_any_ranks_part_does_not_count(half, tmp_path):
    for number in range(4):
        state = shutil.copytree(half("train") / "states" / "step-00000010", tmp_path / str(number))
        assert is_complete(state)
        file = sorted(state.glob("*.safetensors"))[number]
        os.truncate(file, file.stat().st_size - 1)
        assert not is_complete(state)
        file.unlink()
        assert not is_complete(state)


def clips(folder, options):
    train_vae(**{**JOBS["train-vae"][1], **options, "dataset_path": "world:16:1+5x32x32", "frames": (5,), "output_dir": folder})


def test_ranks_with_pictures_and_ranks_with_clips(tmp_path):
    """Of a VAE whose pictures have no use for some weights, all ranks exchange the same gradients all the same."""
    options = {"batch_size": 2, "num_steps": 4, "use_ema": True, "held_out": "world-heldout:3:1x32x32"}
    for name, ranks, how in (("two", 2, {**FSDP, "gradient_accumulation": 1}), ("one", 1, {"gradient_accumulation": 2})):
        (tmp_path / name).mkdir()
        run_ranks(ranks, clips, tmp_path / name, {**options, **how}, folder=tmp_path / name)
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("two", "one")
    ]
    for mine, theirs in zip(*lines, strict=True):
        for key in comparable(theirs):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4), (theirs["step"], key)


# A thread of the process group that lives on can abort the process when the interpreter ends.
COMMAND = """
import sys
from pathlib import Path
from wandistiller.cli.main import main

folder = Path(sys.argv[1])
size = ["--width", "32", "--height", "32", "--frames", "1", "--max_aspect", "1", "--workers", "0", "--num_steps", "3"]
data = ["--dataset_path", "world:8:1x32x32", "--parallel", "hsdp", "--shard_size", "2", *size, "--output_dir", folder / "two"]
how = ["--teacher_device_strategy", "sharded", "--learning_rate", "1e-3", "--mixed_precision", "bf16"]
flags = [str(flag) for flag in ("distill", "--teacher_path", "tiny-random", *data, *how)]
assert main(flags) == 0
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in threads if "gloo" in name], threads
main([*flags, "--shard_size", "3", "--output_dir", str(folder / "no")])
"""


def test_a_command_under_torchrun(tmp_path):
    (tmp_path / "job.py").write_text(COMMAND)
    done = torchrun(tmp_path / "job.py", tmp_path)
    assert "2 ranks cannot be split into groups of 3" in done.stderr, done.stderr
    # Elsewhere ranks do not foresee what they take.
    assert "of each of 2 ranks" in done.stdout + done.stderr and json.loads((tmp_path / "two" / "plan.json").read_text())
    assert "FSDP2-wrapped" not in done.stderr and "torch.distributed is disabled" not in done.stderr
    options = {**SIZE, "num_steps": 3, "batch_size": 2, "mixed_precision": "bf16", "dataset_path": "world:8:1x32x32"}
    distill(teacher_path="tiny-random", frames=(1,), **options, output_dir=tmp_path / "one")
    found, expected = weights(tmp_path / "two"), weights(tmp_path / "one")
    for name, value in expected.items():
        # Processes whose sets and hashes are in different orders exchange the gradients of the same weights all the same.
        assert (found[name] - value).abs().mean() < 2e-4, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "fsdp"}, "torchrun did not start this"),
        ({"shard_size": 2}, "--shard-size is for --parallel hsdp"),
        ({"parallel": "fsdp", "optimizer": "adafactor"}, "needs --optimizer adamw"),
        ({"parallel": "fsdp", "placement": "offload"}, "--placement offload does not go with --parallel fsdp"),
        ({"parallel": "hsdp", "cuda_graphs": True}, "--cuda-graphs does not go with --parallel hsdp"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        train(model="tiny-random", **PICTURES, **SIZE, **options, output_dir=tmp_path)
