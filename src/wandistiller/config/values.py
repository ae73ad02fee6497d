"""Values of a configuration's fields from what a file or a caller gives for them."""

from __future__ import annotations

import types
import typing
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from wandistiller.errors import UsageError, nearest, shortened

_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of a JSON file, which may name something twice without anybody noticing; ``ValueError`` if it does."""
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"{shortened(map(repr, repeated))} stands there more than once")
    return dict(pairs)


def convert_value(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` as the annotated type or raise; whole numbers pass as floats, strings as paths."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if option is type(None):
                continue
            try:
                return convert_value(value, option, where)
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
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(convert_value(item, arguments[0], where) for item in items)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = _KINDS.get(hint, str(hint))
    raise UsageError(f"{where} = {value!r} is not {wanted}.", fix=f"Write {wanted}.")
