import os
import subprocess
import sys
import typing

import pytest

from wandistiller.cli.arguments import field_docs
from wandistiller.cli.main import COMMANDS, let_segments_grow, main, parse

TORCH_FREE = """
import sys
from wandistiller.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
heavy = {{"torch", "diffusers", "transformers", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS), ["sample", "--steps", "x"]])
def test_help_and_parsing_need_no_torch(arguments):
    subprocess.run([sys.executable, "-c", TORCH_FREE.format(arguments=arguments)], check=True, capture_output=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_help(name):
    config_class = COMMANDS[name].config_class()
    docs = field_docs(config_class)
    for field in config_class.__dataclass_fields__:
        assert len(docs.get(field, "")) > 20, f"--{field} of {name}"
        assert docs[field].endswith("."), f"--{field} of {name}"


def test_every_command_is_a_function_of_the_api():
    from wandistiller import api

    assert all(callable(getattr(api, name.replace("-", "_"))) for name in COMMANDS)


def test_flags_in_both_spellings():
    for flag in ("--cfg-scale", "--cfg_scale"):
        assert parse("sample", [flag, "3.5"]).cfg_scale == 3.5
    assert parse("sample", ["--offload_to_cpu"]).offload_to_cpu
    assert not parse("sample", ["--no-offload-to-cpu"]).offload_to_cpu


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "run.toml").write_text("steps = 7\nseed = 9\noffload_to_cpu = true")
    config = parse("sample", ["--config", str(tmp_path / "run.toml"), "--steps", "3", "--no-offload-to-cpu"])
    assert (config.steps, config.seed, config.offload_to_cpu, config.batch_size) == (3, 9, False, 1)
    assert parse("sample", [f"--config={tmp_path / 'run.toml'}"]).steps == 7


def test_parsing_gives_the_very_class():
    assert type(parse("sample", [])) is COMMANDS["sample"].config_class()


@pytest.mark.parametrize(
    "flags", [["--output-latent"], ["--output_latent", "--steps", "3"], ["--steps", "3", "--output-latent"]]
)
def test_a_bare_latent_flag(flags):
    assert str(parse("sample", flags).output_latent) == "auto"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sampel"], "did you mean 'sample'"),
        (["sample", "--modle", "x"], "--model"),
        (["sample", "--solver", "eulr"], "euler"),
        (["sample", "--steps", "many"], "--steps"),
        (["sample", "--config", "/no/such.toml"], "cannot be read"),
        (["sample", "--model", "tiny"], "nothing to draw"),
        (["export", "--model", "tiny"], "--output is missing"),
        (["doctor", "--disk", "/no/such"], "is not a folder"),
        (["distil"], "There is no command 'distil'; did you mean 'distill'?"),
    ],
)
def test_wrong_input_exits_with_2(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.out + captured.err


def test_no_command_shows_the_overview(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("wandistiller 0.")


def test_the_choices_of_export_are_the_registry():
    from wandistiller.checkpoint.formats import WRITERS

    hints = typing.get_type_hints(COMMANDS["export"].config_class())
    assert set(typing.get_args(hints["format"])) == set(WRITERS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
    ],
)
def test_memory_grows_in_place_unless_the_user_says_otherwise(monkeypatch, given, expected):
    monkeypatch.setattr("os.environ", dict(given))
    monkeypatch.setattr("sys.platform", "linux")
    let_segments_grow()
    assert os.environ == expected


def test_the_program_is_told_before_pytorch_is_there():
    code = (
        "import os, sys\nfrom wandistiller.cli import main as program\nassert 'torch' not in sys.modules\n"
        "program.start(['--version'])\nprint(os.environ['PYTORCH_ALLOC_CONF'])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "expandable_segments:True"
