"""Strict TOML: every key must be a field of the command's configuration, and every value of its type."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from pathlib import Path
from typing import Any, TypeVar

from wandistiller.config.command import CommandConfig
from wandistiller.config.presets import find_preset
from wandistiller.config.values import convert_value
from wandistiller.errors import UsageError, nearest
from wandistiller.files import complete_or_absent

ConfigT = TypeVar("ConfigT", bound=CommandConfig)


def read_toml(path: Path) -> dict[str, Any]:
    """Return what stands in a file given with --config."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read.", why=str(error), fix="Check the path and the syntax.") from error


def read_config(
    path: Path,
    config_class: type[ConfigT],
    command: str,
    commands: typing.Collection[str],
    preset: str | None = None,
) -> ConfigT:
    """Return a configuration from a TOML file, with the settings of a preset, or of the file's own, where it has none.

    Keys stand at the top, or in a table named after the command; tables of other commands are left alone, so one file can
    serve a whole project. Both ``-`` and ``_`` are accepted in keys, as on the command line.
    """
    content = read_toml(path)
    values = {key: value for key, value in content.items() if not (isinstance(value, dict) and key in commands)}
    table = content.get(command, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: '{command}' is not a table.", fix=f"Write [{command}] on a line of its own.")
    hints = typing.get_type_hints(config_class)
    fields = {field.name for field in dataclasses.fields(config_class)} - {"config"}
    found: dict[str, Any] = {}
    for key, value in (*values.items(), *table.items()):
        name = key.replace("-", "_")
        if isinstance(value, dict) and name not in fields:
            raise UsageError(f"{path}: there is no command '{key}'{nearest(key, commands)}", fix="Name tables after commands.")
        if name not in fields:
            raise UsageError(
                f"{path}: '{key}' is not a setting of '{command}'{nearest(name, fields)}",
                fix=f"See wandistiller {command} --help for all of them.",
            )
        found[name] = convert_value(value, hints[name], f"{path}: {key}")
    preset = preset or found.get("preset")
    usual = find_preset(command, preset) if preset else {}
    return config_class(**{**usual, **found, "config": path})


def write_config(path: Path, config: CommandConfig, command: str, line: str | None = None) -> None:
    """Write a configuration with every setting, so that ``--config`` of the file starts the same run whatever defaults become.

    What is not set at all is left out. ``line`` is how it is started, where that takes more than the command.
    """
    lines = [f"# {line or f'wandistiller {command} --config {path.name}'}", f"[{command}]"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "config" and value is not None:
            lines.append(f"{field.name} = {_as_toml(value)}")
    with complete_or_absent(path) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _as_toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
