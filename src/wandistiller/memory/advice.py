"""What to change when memory runs out: remedies with their gigabytes and their price in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wandistiller.config.command import flag_words
from wandistiller.units import Bytes


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change of the configuration."""

    changes: dict[str, Any]
    """Fields of the command's configuration and their new values."""
    saves: Bytes
    """Memory that it frees where it ran out."""
    slowdown: float = 1.0
    """How many times as long the work takes, by estimate."""
    why: str = ""

    def __str__(self) -> str:
        flags = " ".join(flag_words(self.changes))
        price = "no slower" if self.slowdown < 1.02 else f"about {self.slowdown:.2g} times as long"
        return f"{flags}: frees {self.saves}, {price}{f' ({self.why})' if self.why else ''}"


def in_order(remedies: Sequence[Remedy]) -> list[Remedy]:
    """Sort by bytes saved against time lost, the best first; those that save nothing are left out."""
    worth = [remedy for remedy in remedies if remedy.saves > 0]
    # What costs no time at all is not infinitely better than what costs a hundredth.
    return sorted(worth, key=lambda remedy: -remedy.saves / (max(remedy.slowdown - 1, 0) + 0.05))


def enough(remedies: Sequence[Remedy], shortage: int) -> list[Remedy]:
    """Return the first remedies that together free what is short, changing each field once; all of them if none suffice."""
    chosen: list[Remedy] = []
    for remedy in remedies:
        if sum(each.saves for each in chosen) > shortage:
            break
        if not any(remedy.changes.keys() & each.changes.keys() for each in chosen):
            chosen.append(remedy)
    return chosen
