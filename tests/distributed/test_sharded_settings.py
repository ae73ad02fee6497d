"""Everything that a card can be told works on slices too: precisions, adapters, policies, compilation, teachers."""

import functools
import json
import os
import signal

import pytest
import torch
from helpers.metrics import comparable
from helpers.ranks import run_ranks

from wandistiller.api import distill, train
from wandistiller.train import samples

# One run serves many tests, so these stay in one process.
pytestmark = pytest.mark.xdist_group("slices")

SIZE = {"width": 32, "height": 32, "max_aspect": 1.0, "frames": (1,), "learning_rate": 1e-3, "log_every": 1, "workers": 0}
TRAIN = {"model": "tiny-random", "dataset_path": "world:12:1x32x32", "num_steps": 4, **SIZE}
SETTINGS = {
    "masters": {"weights_dtype": "bfloat16", "activation_policy": "full"},
    "stochastic": {"weights_dtype": "bfloat16", "rounding": "stochastic"},
    "fp16": {"mixed_precision": "fp16"},
    "compiled": {"mixed_precision": "bf16", "torch_compile": True},
    "adapters": {"lora_rank": 4, "weights_dtype": "bfloat16"},
    "recomputed": {"activation_policy": "selective", "activations_to_host": True},
    "seen": {"held_out": "world-heldout:3:1x32x32", "judge_samples": 3, "sample_every": 4, "use_ema": True, "sample_steps": 2},
}
TEACH = {"teacher_path": "tiny-random", "num_steps": 3, **SIZE}
TEACHERS = {
    "live": {"dataset_path": "world:12:1x32x32", "feature_weight": 0.5},
    "trajectories": {"data_path": "world:6:1x32x32", "num_prompts": 6, "rollout_steps": 3, "rollout_batch": 2},
    "kept": {"dataset_path": "world:6:1x32x32", "cache_teacher": True, "rollout_batch": 2, "teacher_draws": 2},
}


def jobs(command, options, cases, folder):
    # The compiler's work is the same as ever; whether blocks can be compiled at all is seen without its last step.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for number, (name, case) in enumerate(cases.items()):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
        command(**{**options, **case, "output_dir": folder / name})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return the folders of all runs on two ranks with slices, and on one."""
    folder = tmp_path_factory.mktemp("settings")
    for name, ranks, how in (("two", 2, {"parallel": "fsdp"}), ("one", 1, {})):
        (folder / name).mkdir()
        run_ranks(ranks, jobs, train, {**TRAIN, **how, "batch_size": 4 // ranks}, SETTINGS, folder / name, folder=folder / name)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_slices_train_as_a_card_does(both, name):
    found, expected = (lines(both / ranks / name) for ranks in ("two", "one"))
    # In 16 bits the sum over ranks rounds otherwise than the sum over a batch, and stochastic rounding draws otherwise.
    rel = 2e-2 if SETTINGS[name].get("weights_dtype") or "mixed_precision" in SETTINGS[name] else 1e-4
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        for key in comparable(theirs):
            assert mine[key] == pytest.approx(theirs[key], rel=rel, abs=1e-5), (name, theirs["step"], key)


def test_slices_draw_the_same_pictures(both):
    pictures = [sorted((both / ranks / "seen" / "samples").rglob("*.png")) for ranks in ("two", "one")]
    assert [path.name for path in pictures[0]] == [path.name for path in pictures[1]]


def be_stopped_drawing(folder):
    """Rank 1 alone is told to end, in the first of many steps of the solver."""
    drawing = samples.draw

    def draw(model, *rest, **how):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return drawing(model, *rest, **how)

    samples.draw = draw
    looks = {"sample_every": 2, "sample_steps": 1000, "use_ema": True}
    done = train(**{**TRAIN, **looks, "parallel": "fsdp", "batch_size": 2, "output_dir": folder / "run"})
    assert (done.step, done.exit_code) == (2, 128 + signal.SIGTERM)


def test_slices_stop_drawing_together(tmp_path):
    """A rank that left alone would leave the others waiting for its slices."""
    run_ranks(2, be_stopped_drawing, tmp_path, folder=tmp_path)
    assert (tmp_path / "run" / "states" / "step-00000002" / "state.json").exists()
    assert not (tmp_path / "run" / "samples").exists()


def test_a_teacher_in_slices_says_the_same(tmp_path, two_expert_folder):
    """Also of two experts, and where the questions cannot be shared out evenly."""
    cases = {**TEACHERS, "experts": {**TEACHERS["kept"], "teacher_path": str(two_expert_folder)}}
    sharded = {"teacher_device_strategy": "sharded"}
    for name, ranks, how in (("two", 2, sharded), ("both", 2, {**sharded, "parallel": "fsdp"}), ("one", 1, {})):
        (tmp_path / name).mkdir()
        options = {**TEACH, **how, "batch_size": 4 // ranks}
        run_ranks(ranks, jobs, distill, options, cases, tmp_path / name, folder=tmp_path / name)
    for name in cases:
        expected = [line["loss"] for line in lines(tmp_path / "one" / name)]
        for way in ("two", "both"):
            assert [line["loss"] for line in lines(tmp_path / way / name)] == pytest.approx(expected, rel=1e-4), (name, way)
