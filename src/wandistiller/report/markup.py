"""HTML and SVG in which every text is escaped unless it was made here."""

from __future__ import annotations

import html

_EMPTY_TAGS = ("meta", "img", "br")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Return an element; children that are no ``Markup`` are escaped, as are attributes.

    A last ``_`` of an attribute's name goes (``class_``) and others become ``-``; one that is None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY_TAGS:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{''.join(map(escape, children))}</{name}>")


def escape(text: str) -> str:
    """Return text as HTML shows it."""
    return text if isinstance(text, Markup) else html.escape(text)


def _text(value: str | float) -> str:
    # Two decimals of a pixel are more than anyone sees.
    return f"{round(value, 2):g}" if isinstance(value, float) else str(value)
