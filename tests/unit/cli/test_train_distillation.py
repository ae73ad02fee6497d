"""The script's own flags: shown by its help, and turned into those of the command."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[3] / "scripts" / "train_distillation.py")


def test_its_help_names_its_own_flags_and_those_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(SCRIPT, run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0
    own = ("--lr", "--num_workers", "--save_samples", "--sample_interval", "--multi_gpu")
    assert all(f"  {flag} " in said for flag in own)
    assert "usage: train_distillation.py" in said and "--teacher-device-strategy" in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--lr", "1e-4", "--num_workers=2"], ["--learning-rate", "1e-4", "--workers=2"]),
        (["--save_samples"], ["--sample-every", "500"]),
        (["--save_samples", "--sample_interval", "7"], ["--sample-every", "7"]),
        (["--mixed_precision", "--teacher_on_cpu"], ["--mixed-precision", "auto", "--teacher-on-cpu"]),
        (["--data_path", "my_prompts.txt"], ["--data-path", "my_prompts.txt"]),
    ],
)
def test_flags_are_translated(given, expected):
    assert runpy.run_path(SCRIPT)["translated"](given) == expected
