"""Where a role's weights live, as users say it; what each name means is in ``wandistiller.memory``."""

from __future__ import annotations

from typing import Literal

from wandistiller.errors import UsageError
from wandistiller.units import Bytes

PlacementName = Literal["auto", "gpu", "cpu", "offload", "disk", "balanced", "sequential", "custom"]
SPREAD = ("balanced", "sequential", "custom")
"""Those that are over several GPUs of one process."""


def parse_resident(text: str, flag: str) -> int | Literal["auto"]:
    """Read how many blocks stay on the card."""
    if text == "auto":
        return "auto"
    if not text.isdigit():
        raise UsageError(f"{flag} {text} is not a number of blocks.", fix="Give a number, or 'auto'.")
    return int(text)


def parse_limits(texts: tuple[str, ...], flag: str) -> dict[int | str, int] | None:
    """Read limits of memory, for each GPU in their order or by number, and for the host: ``20GiB 1=10GiB cpu=64GiB``."""
    limits: dict[int | str, int] = {}
    for index, text in enumerate(texts):
        name, _, size = text.rpartition("=")
        if name and name != "cpu" and not name.isdigit():
            raise UsageError(f"{flag} {text} names '{name}', which is no GPU.", fix="Write 0=20GiB, or cpu=64GiB.")
        limits["cpu" if name == "cpu" else int(name or index)] = Bytes.parse(size)
    return limits or None
