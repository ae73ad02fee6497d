"""The script's flags, together as they are described, are those of the command."""

import runpy
from pathlib import Path

import pytest

from wandistiller.cli.main import parse

SCRIPT = str(Path(__file__).parents[3] / "scripts" / "train_flow_matching.py")
DESCRIBED = (
    "--dataset_path clips --batch_size 2 --num_epochs 3 --gradient_checkpointing --vae_gradient_checkpointing "
    "--learning_rate 1e-5 --checkpoint_dir runs/a --ckpt_path a.safetensors --use_8bit_adam --torch_compile --use_ema"
).split()


@pytest.fixture(scope="module")
def translated():
    return runpy.run_path(SCRIPT)["translated"]


def test_all_described_flags_go_together(translated, capsys):
    config = parse("train", ["--model", "tiny", *translated(DESCRIBED)])
    config.check()
    assert config.output_dir == Path("runs/a") and config.policy == "full" and not config.vae_gradient_checkpointing
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--vae_gradient_checkpointing has nothing to do" in said


@pytest.mark.parametrize("more", [["--pixel_loss_weight", "0.1"], ["--pixel-loss-weight=0.1"], ["--config", "a.toml"]])
def test_the_vae_is_checkpointed_where_there_may_be_a_loss_in_pixels(translated, capsys, more):
    assert "--vae_gradient_checkpointing" in translated([*DESCRIBED, *more])
    assert not capsys.readouterr().err
