"""``train`` under torchrun on the CPU: two ranks are one with the same global batch."""

import json
from pathlib import Path

import pytest
import torch
from helpers.torchrun import torchrun
from safetensors.torch import load_file

from wandistiller.api import train

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_flow_matching.py"
WORLD = ["--dataset_path", "world:12:1x32x32", "--width", "32", "--height", "32", "--frames", "1", "--max_aspect", "1"]
FLAGS = ["--model", "tiny-random", *WORLD, "--learning_rate", "1e-3", "--num_steps", "4", "--log_every", "1", "--workers", "0"]


def read(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines], load_file(folder / "model" / "transformer" / "diffusion_pytorch_model.safetensors")


def test_two_ranks_are_one_with_the_same_global_batch(tmp_path):
    done = torchrun(SCRIPT, *FLAGS, "--batch_size", 1, "--checkpoint_dir", tmp_path / "two", "--distributed")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of each of 2 ranks") == 1, "the first one says what each will take"
    same = {"learning_rate": 1e-3, "num_steps": 4, "log_every": 1, "workers": 0, "width": 32, "height": 32, "max_aspect": 1.0}
    train(model="tiny-random", dataset_path="world:12:1x32x32", frames=(1,), **same, batch_size=2, output_dir=tmp_path / "one")
    (losses, weights), (expected_losses, expected) = read(tmp_path / "two"), read(tmp_path / "one")
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4, msg=name)


BROKEN = """
import sys, torch
from wandistiller.cli.main import main
from wandistiller.train.methods.finetune import FlowMatching

losses = FlowMatching.losses
def fail(self, batch):
    import torch.distributed as dist
    if dist.get_rank() == 1 and batch.position >= 4:
        raise {error}
    return losses(self, batch)
FlowMatching.losses = fail
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            'torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")',
            "Out of GPU memory while training, role",
        ),
        ('ValueError("a bug of its own")', "ValueError: a bug of its own"),
    ],
)
def test_a_rank_that_fails_ends_the_job_with_its_own_error(tmp_path, error, expected):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(error=error))
    done = torchrun(script, *FLAGS, "--batch_size", 1, "--output_dir", tmp_path / "run", timeout=120)
    assert done.returncode == 1
    assert expected in done.stderr.partition("Root Cause")[2], "what torchrun shows as the root cause"
    assert "rank      : 1" in done.stderr.partition("Root Cause")[2]
