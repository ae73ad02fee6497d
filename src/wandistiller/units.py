"""Sizes as people write them: ``Bytes.parse("24GiB")``, ``str(Bytes(25769803776)) == "24.0 GiB"``."""

from __future__ import annotations

import re

from wandistiller.errors import UsageError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


class Bytes(int):
    """A number of bytes that prints itself in binary units."""

    @classmethod
    def parse(cls, text: str) -> Bytes:
        """Read ``24GiB``, ``24 GB``, ``512MiB`` or a plain number of bytes, if it is one that somebody can have meant."""
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        unit = match.group(2).lower() if match else "?"
        if match is None or unit not in _FACTORS:
            raise UsageError(f"'{text}' is not a size.", fix="Write a number and a unit, such as 24GiB, 512MiB or 80GB.")
        size = cls(round(float(match.group(1)) * _FACTORS[unit]))
        if not unit and 0 < size < 2**20:
            raise UsageError(f"'{text}' has no unit.", fix=f"Write {text.strip()}GiB, or {text.strip()}B if bytes are meant.")
        return size

    def __str__(self) -> str:
        for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if abs(self) >= factor:
                return f"{self / factor:.1f} {unit}"
        return f"{int(self)} B"

    def __format__(self, spec: str) -> str:
        is_for_numbers = bool(spec) and spec[-1] in ",_bcdoxXneEfFgG%"
        return format(int(self), spec) if is_for_numbers else format(str(self), spec)

    def __add__(self, other: int) -> Bytes:
        return Bytes(int(self) + int(other))

    __radd__ = __add__
