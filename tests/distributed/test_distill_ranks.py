"""``distill`` under torchrun on the CPU: two ranks are one with the same global batch, wherever the teacher is."""

import json
import os
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.torchrun import torchrun

from wandistiller.api import distill

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_distillation.py"
SIZE = ["--width", "32", "--height", "32", "--frames", "1", "--max_aspect", "1"]
FLAGS = ["--teacher_path", "tiny-random", *SIZE, "--lr", "1e-3", "--num_steps", "3", "--log_every", "1", "--num_workers", "0"]
SAME = {"learning_rate": 1e-3, "num_steps": 3, "log_every": 1, "workers": 0, "width": 32, "height": 32, "max_aspect": 1.0}
DATA = {
    "live": {"dataset_path": "world:12:1x32x32", "feature_weight": 0.5, "guidance_weight": 1.0, "guidance_scale": 6.0},
    "stored": {"data_path": "world:8:1x32x32", "num_prompts": 8, "rollout_steps": 3, "rollout_batch": 3, "refresh_every": 2},
}


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("kind", "strategy"), [("live", "gpu"), ("stored", "gpu0")])
def test_two_ranks_are_one_with_the_same_global_batch(tmp_path, kind, strategy):
    data = [part for name, value in DATA[kind].items() for part in (f"--{name}", str(value))]
    where = ["--teacher_device_strategy", strategy, "--output_dir", tmp_path / "two", "--distributed"]
    done = torchrun(SCRIPT, *FLAGS, *data, *where, "--batch_size", 2)
    assert done.returncode == 0, done.stderr
    distill(teacher_path="tiny-random", frames=(1,), **SAME, **DATA[kind], batch_size=4, output_dir=tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


CASES = {
    **{name: {"teacher_device_strategy": name} for name in ("gpu0", "offload", "cpu", "disk", "balanced", "sequential")},
    "chosen": {"teacher_device_strategy": "gpu0", "layer_choice": "importance"},
}


def runs(options, cases, folder):
    for number, (name, case) in enumerate(cases.items()):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
        distill(**options, **case, output_dir=folder / name)


def test_every_strategy_gives_the_same_losses_on_two_ranks(tmp_path):
    options = {"teacher_path": "tiny-random", "frames": (1,), **SAME, **DATA["live"]}
    run_ranks(2, runs, {**options, "batch_size": 2}, CASES, tmp_path / "two", folder=tmp_path)
    runs_of_one = {"plain": {}, "chosen": {"layer_choice": "importance"}}
    for name, case in runs_of_one.items():
        distill(**options, **case, batch_size=4, output_dir=tmp_path / "one" / name)
    for name in CASES:
        expected = losses(tmp_path / "one" / ("chosen" if name == "chosen" else "plain"))
        assert losses(tmp_path / "two" / name) == pytest.approx(expected, rel=1e-4), name
