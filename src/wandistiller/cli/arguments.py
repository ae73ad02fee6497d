"""Flags from a configuration class: its fields, their types, and the docstring under each as the help text."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from wandistiller.config.command import CommandConfig

ConfigT = TypeVar("ConfigT", bound=CommandConfig)


def parse_flags(config_class: type[ConfigT], flags: Sequence[str], default: ConfigT, prog: str) -> ConfigT:
    """Return ``default`` with the flags applied; tyro prints help and errors and exits with 0 and 2 itself."""
    import tyro

    hints, docs = typing.get_type_hints(config_class), field_docs(config_class)
    fields: list[Any] = []
    for field in dataclasses.fields(config_class):
        has_default = getattr(default, field.name) not in (None, ())
        # An absent default is described in the text; "(default: None)" would only puzzle.
        hint = tyro.conf.arg(help=docs[field.name], help_behavior_hint=None if has_default else "")
        fields.append((field.name, Annotated[hints[field.name], hint], dataclasses.field(default=getattr(default, field.name))))
    documented = dataclasses.make_dataclass(config_class.__name__, fields, bases=(config_class,), frozen=True, kw_only=True)
    documented.__doc__ = config_class.__doc__
    values: Any = tyro.cli(documented, prog=prog, args=list(flags), config=(tyro.conf.DisallowNone,))
    return config_class(**{field.name: getattr(values, field.name) for field in dataclasses.fields(config_class)})


def field_docs(config_class: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its bases, as one paragraph each."""
    docs: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and _is_docstring(following):
                docs[statement.target.id] = " ".join(ast.literal_eval(following.value).split())  # type: ignore[attr-defined]
    return docs


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    )
