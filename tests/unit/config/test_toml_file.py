import dataclasses
from pathlib import Path

import pytest

from wandistiller.config.sample import SampleConfig
from wandistiller.config.toml_file import read_config, write_config
from wandistiller.config.train import TrainConfig
from wandistiller.errors import UsageError

COMMANDS = ("sample", "export", "doctor")


def read(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return read_config(path, SampleConfig, "sample", COMMANDS)


def test_a_file_that_begins_with_a_byte_order_mark(tmp_path):
    assert read(tmp_path, "\ufeffsteps = 12").steps == 12


def test_values_of_every_kind(tmp_path):
    config = read(
        tmp_path,
        """
        model = "tiny"
        prompt = ["a", "b"]
        steps = 12
        cfg-scale = 4
        offload_to_cpu = true
        output = "x.png"
        solver = "euler"
        """,
    )
    assert (config.model, config.prompt, config.steps) == ("tiny", ("a", "b"), 12)
    assert (config.cfg_scale, type(config.cfg_scale)) == (4.0, float)
    assert (config.offload_to_cpu, config.output, config.solver) == (True, Path("x.png"), "euler")


def test_one_prompt_needs_no_list(tmp_path):
    assert read(tmp_path, 'prompt = "a"').prompt == ("a",)


def test_a_table_of_the_commands_own(tmp_path):
    config = read(tmp_path, 'seed = 1\n[sample]\nsteps = 3\n[export]\nformat = "comfyui"')
    assert (config.seed, config.steps) == (1, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stesp = 3", r"'stesp' is not a setting of 'sample'; did you mean 'steps'"),
        ("[sample]\nstesp = 3", "did you mean 'steps'"),
        ("[sampel]\nsteps = 3", "there is no command 'sampel'; did you mean 'sample'"),
        ("steps = 'many'", "steps = 'many' is not a whole number"),
        ("steps = true", "is not a whole number"),
        ("steps = 2.5", "is not a whole number"),
        ("offload_to_cpu = 1", "is not true or false"),
        ("solver = 'eulr'", "did you mean 'euler'"),
        ("prompt = [1]", "is not a text"),
        ("config = 'other.toml'", "'config' is not a setting"),
        ("sample = 3", "'sample' is not a table"),
        ("steps = ", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path / "none.toml", SampleConfig, "sample", COMMANDS)


def test_what_is_written_is_read_again(tmp_path):
    config = TrainConfig(
        model='a "quoted" näme', dataset_path="clips", frames=(5, 9), use_ema=True, learning_rate=2e-5, output_dir=tmp_path
    )
    write_config(tmp_path / "run.toml", config, "train")
    found = read_config(tmp_path / "run.toml", TrainConfig, "train", ["train", "sample"])
    assert dataclasses.replace(found, config=None) == config
