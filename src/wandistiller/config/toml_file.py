"""Strict TOML: every key must be a field of the command's configuration, and every value of its type."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from wandistiller.config.command import CommandConfig
from wandistiller.errors import UsageError, nearest

ConfigT = TypeVar("ConfigT", bound=CommandConfig)


def read_config(path: Path, config_class: type[ConfigT], command: str, commands: typing.Collection[str]) -> ConfigT:
    """Return a configuration from a TOML file.

    Keys stand at the top, or in a table named after the command; tables of other commands are left alone, so one file can
    serve a whole project. Both ``-`` and ``_`` are accepted in keys, as on the command line.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read.", why=str(error), fix="Check the path and the syntax.") from error
    values = {key: value for key, value in content.items() if not (isinstance(value, dict) and key in commands)}
    table = content.get(command, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: '{command}' is not a table.", fix=f"Write [{command}] on a line of its own.")
    hints = typing.get_type_hints(config_class)
    fields = {field.name for field in dataclasses.fields(config_class)} - {"config"}
    found: dict[str, Any] = {}
    for key, value in (*values.items(), *table.items()):
        name = key.replace("-", "_")
        if name not in fields:
            raise UsageError(
                f"{path}: '{key}' is not a setting of '{command}'{nearest(name, fields)}",
                fix=f"See wandistiller {command} --help for all of them.",
            )
        found[name] = _convert(value, hints[name], f"{path}: {key}")
    return config_class(config=path, **found)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` as the annotated type or raise; whole numbers pass as floats, strings as paths."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if option is type(None):
                continue
            try:
                return _convert(value, option, where)
            except UsageError:
                if option == [kind for kind in arguments if kind is not type(None)][-1]:
                    raise
    if origin is Literal:
        if value in arguments:
            return value
        raise UsageError(
            f"{where} = {value!r} is not a choice{nearest(str(value), map(str, arguments))}",
            fix=f"Choose one of {', '.join(map(str, arguments))}.",
        )
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(item, arguments[0], where) for item in items)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise UsageError(f"{where} = {value!r} is not a {hint.__name__}.", fix=f"Write a {hint.__name__}.")
