"""``make tiny``: the commands that it runs are this project's own, and its result becomes the box."""

import argparse
import importlib.util
import shutil
from pathlib import Path

import pytest

from wandistiller.cli.main import parse

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_tiny", ROOT / "scripts" / "make_tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def output(tmp_path, tiny_folder):
    """What a run leaves."""
    shutil.copytree(tiny_folder, tmp_path / "run" / "pipeline")
    (tmp_path / "run" / "train").mkdir()
    (tmp_path / "run" / "train" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n')
    (tmp_path / "run" / "commands.txt").write_text("wandistiller train --seed 0  # 1 s\n")
    return tmp_path / "run"


def test_the_result_takes_the_place_of_an_older_one(script, output, tmp_path):
    (tmp_path / "box" / "pipeline" / "old").mkdir(parents=True)
    script.install(output, tmp_path / "box")
    found = {path.relative_to(tmp_path / "box").parts[0] for path in (tmp_path / "box").rglob("*")}
    assert found == {"pipeline", "commands.txt", "train.jsonl"}
    assert (tmp_path / "box" / "pipeline" / "model_index.json").is_file()
    assert not (tmp_path / "box" / "pipeline" / "old").exists()


def test_what_is_too_large_leaves_the_box_alone(script, output, tmp_path):
    (tmp_path / "box").mkdir()
    (output / "pipeline" / "vae" / "more.safetensors").write_bytes(bytes(script.MOST_BYTES))
    with pytest.raises(SystemExit, match="MB"):
        script.install(output, tmp_path / "box")
    assert not list((tmp_path / "box").iterdir())


def test_every_command_has_flags_that_exist_and_trainings_say_their_seed(script, tmp_path):
    ran = []

    def run(*parts, times=1):
        ran.append([argument for part in parts for argument in part])

    sizes = {"vae_steps": 10, "clip_steps": 10, "steps": 10, "vae_batch": 2, "batch": 2, "samples": 4, "encoders": 1}
    rest = {"vae": None, "rate": "1e-3", "device": "cpu", "graphs": False, "workers": 0}
    arguments = argparse.Namespace(output=tmp_path, **sizes, **rest)
    vae = script.train_vae(arguments, run, tmp_path / "start")
    script.train_transformer(arguments, run, tmp_path / "learner")
    assert vae == tmp_path / "clips" / "vae"
    assert [flags[0] for flags in ran] == ["train-vae", "train-vae", "encode", "encode", "train"]
    for command, *flags in ran:
        parse(command, flags).check()
        assert command == "encode" or "--seed" in flags


def test_an_output_that_is_complete_is_only_installed(script, output, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "BOX", tmp_path / "box")
    monkeypatch.setattr("sys.argv", ["make_tiny.py", "--output", str(output), "--install"])
    script.main()
    assert (tmp_path / "box" / "pipeline" / "model_index.json").is_file()
    assert (tmp_path / "box" / "commands.txt").read_text() == (output / "commands.txt").read_text()
