"""``train-vae`` with a critic on the CPU: two ranks are one with the same global batch."""

import json
import warnings

import pytest
import torch
from helpers.metrics import comparable
from helpers.ranks import run_ranks

from wandistiller.api import train_vae
from wandistiller.checkpoint.training_state import TrainingStates, load_state

OPTIONS = {
    "model": "tiny-random",
    "width": 32,
    "height": 32,
    "max_aspect": 1.0,
    "num_steps": 4,
    "log_every": 1,
    "workers": 0,
    "learning_rate": 1e-3,
    "statistics_samples": 2,
    "kl_beta": 1e-2,
    "kl_warmup_steps": 2,
    "critic_width": 4,
    "gan_start": 1,
    "r1_interval": 2,
    "gan_training": True,
}


def read(folder):
    """Return the metrics of each step, and all that was trained, the critic's norms too."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tensors = load_state(TrainingStates(folder / "states", 1).newest()).tensors
    return lines, {name: value for name, value in tensors.items() if name.startswith("roles/")}


def be_rank(options):
    with warnings.catch_warnings(record=True) as caught:
        train_vae(**options)
    assert not [warning for warning in caught if "strides" in str(warning.message)], "of what nobody can change"


PICTURES = {"dataset_path": "world:16:1x32x32", "frames": (1,)}
BOTH = {"dataset_path": "world:16:1+5x32x32", "frames": (5,)}


@pytest.mark.parametrize(
    ("data", "two", "one"),
    [
        (PICTURES, {"batch_size": 1, "gradient_accumulation": 2}, {"batch_size": 4}),
        ({**PICTURES, "reduced_min_sizes": (24,)}, {"batch_size": 2}, {"batch_size": 4}),
        # Batches are of one shape, so these stay as they are; one rank may have a picture, and its VAE no use for some weights.
        (BOTH, {"batch_size": 2}, {"batch_size": 2, "gradient_accumulation": 2}),
    ],
    ids=["accumulation", "two sizes", "pictures and clips"],
)
def test_two_ranks_are_one_with_the_same_global_batch(data, two, one, tmp_path):
    run_ranks(2, be_rank, {**OPTIONS, **data, **two, "output_dir": tmp_path / "two"}, folder=tmp_path)
    train_vae(**OPTIONS, **data, **one, output_dir=tmp_path / "one")
    (lines, tensors), (expected_lines, expected) = read(tmp_path / "two"), read(tmp_path / "one")
    happened = [("critic/r1" in line, "adversarial" in line) for line in lines]
    assert happened == [(True, False), (False, True), (True, True), (False, True)]
    for line, expected_line in zip(lines, expected_lines, strict=True):
        for name in comparable(expected_line):
            assert line[name] == pytest.approx(expected_line[name], rel=1e-3, abs=1e-4), (line["step"], name)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        # In the first steps Adam makes much of the rounding of gradients that are nearly zero.
        torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=2e-4, msg=name)
