"""A mark on modules that something outside has attached itself to: a plain copy of them would still belong to the original."""

from __future__ import annotations

from typing import Any

from torch import nn

from wandistiller.errors import UsageError


class Attached:
    """Lies in a module's attributes while something is attached, and makes copying and pickling an error."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __deepcopy__(self, memo: Any) -> Any:
        raise self._refusal()

    def __reduce__(self) -> Any:
        raise self._refusal()

    def _refusal(self) -> UsageError:
        return UsageError(
            f"A model with {self._what} cannot be copied.",
            why="the copy would compute with the original's weights.",
            fix="Copy it before, or detach first.",
        )


def attach_mark(module: nn.Module, name: str, what: str) -> None:
    """Mark a module; ``remove_mark`` with the same name takes it off."""
    module.__dict__[f"_attached_{name}"] = Attached(what)


def remove_mark(module: nn.Module, name: str) -> None:
    """Take a mark off, if it is there."""
    module.__dict__.pop(f"_attached_{name}", None)
