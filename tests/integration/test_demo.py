"""``make demo``: its configuration leaves what it promises, in a few steps of it, and its student is as small as it says."""

import json
import shutil
from pathlib import Path

import pytest

from wandistiller.cli.main import main, parse
from wandistiller.models.sizes import find_size
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.models.student_config import read_student_config

ROOT = Path(__file__).parents[2]
CONFIG = "examples/demo.toml"


@pytest.fixture
def checkout(tmp_path, monkeypatch, some_box):
    """A folder with the examples, to run in."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_student_has_less_than_half_of_the_parameters(checkout):
    teacher = find_size("tiny-world").transformer
    config = parse("distill", ["--config", CONFIG])
    plan = read_student_config(config.student_config, teacher)
    whole = sum(parameter.numel() for parameter in build_empty(TRANSFORMER, teacher).parameters())
    assert plan.num_parameters() < whole / 2


def test_it_leaves_student_metrics_and_report(checkout, capsys):
    few = ["--num-steps", "2", "--batch-size", "2", "--dataset-path", "world:4:1x64x64", "--log-every", "1"]
    few += ["--held-out", "world-heldout:2:1x64x64", "--judge-samples", "2"]
    assert main(["distill", "--config", CONFIG, *few]) == 0, capsys.readouterr().err
    assert main(["report", "--config", CONFIG, "--steps", "2"]) == 0, capsys.readouterr().err
    run = checkout / "runs" / "demo"
    assert (run / "model" / "model_index.json").is_file()
    assert list((run / "tensorboard").iterdir())
    names = {name for line in (run / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert {"loss", "output_loss", "feature_loss", "memory/host_gb", "marks/overall"} <= names
    page = (run / "report.html").read_text()
    assert all(title in page for title in ("Teacher", "Student", "Marks", "Loss", "Memory", "--resume auto"))
    said = capsys.readouterr().err
    assert "Wrote runs/demo/report.html" in said
    assert "The judge's marks of the student" in said


def test_make_runs_these_two_commands():
    recipe = (ROOT / "Makefile").read_text()
    assert all(f"wandistiller {command} --config {CONFIG}" in recipe for command in ("distill", "report"))
