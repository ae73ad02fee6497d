"""Every code block in the documentation works: run in order in one folder a page, or parsed where it needs real weights."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from wandistiller.cli.main import COMMANDS, main, parse
from wandistiller.config.distill import StrategyName
from wandistiller.memory.placements import PLACEMENTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(text):
    """Split a block of shell into commands, continued lines joined and comments left out."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [shlex.split(line, comments=True) for line in lines if shlex.split(line, comments=True)]


def run(command, capsys):
    """Run one command as a shell would; in this process, because importing diffusers takes seconds."""
    if command[0] == "make":
        subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, check=True, capture_output=True)
        return
    assert command[0] == "wandistiller"
    target = None
    if ">" in command:
        command, target = command[: command.index(">")], command[-1]
    assert main(command[1:]) == 0, capsys.readouterr().err
    if target:
        Path(target).write_text(capsys.readouterr().out)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks(page, tmp_path, own_cache, some_box, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for language, mark, code in BLOCK.findall(page.read_text()):
        if language == "toml":
            Path(re.match(r"# (\S+)", code).group(1)).write_text(code)
        elif language == "python":
            exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
        elif language == "sh" and mark.strip() == "parse":
            for command in commands(code):
                assert command[0] == "wandistiller"
                parse(command[1], command[2:]).check()
        elif language == "sh":
            for command in commands(code):
                run(command, capsys)
        elif language:  # a block without a language is a drawing
            pytest.fail(f"{page.name} has a block in '{language}', which no test runs")


def test_every_strategy_has_a_section():
    sections = re.findall(r"^## `(\w+)`$", (ROOT / "docs" / "strategies.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(get_args(StrategyName))
    assert {*get_args(StrategyName)} == {*PLACEMENTS, "gpu0", "sharded"}


def test_every_command_has_a_page_and_the_readme_links_it():
    readme = (ROOT / "README.md").read_text()
    for name in COMMANDS:
        assert (ROOT / "docs" / f"{name}.md").is_file()
        assert f"(docs/{name}.md)" in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
