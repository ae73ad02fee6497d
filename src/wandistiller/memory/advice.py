"""What to change when memory runs out: remedies with their gigabytes and their price in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        hardly = "no slower" if self.slowdown < 1.02 else "hardly slower"
        price = hardly if self.slowdown < 1.05 else f"about {self.slowdown:.2g} times as long"
        return f"{flags}: frees {self.saves}, {price}{f' ({self.why})' if self.why else ''}"


def in_order(remedies: Sequence[Remedy]) -> list[Remedy]:
    """Sort by bytes saved against time lost, the best first; those that save nothing are left out."""
    worth = [remedy for remedy in remedies if remedy.saves > 0]
    # What costs no time at all is not infinitely better than what costs a hundredth.
    return sorted(worth, key=lambda remedy: -remedy.saves / (max(remedy.slowdown - 1, 0) + 0.05))


def enough(
    remedies: Sequence[Remedy], shortage: int, is_possible: Callable[[dict[str, Any]], bool] = lambda changes: True
) -> list[Remedy]:
    """Return the first remedies that together free what is short; all of them if none suffice.

    Each field is changed once, and what does not go together with those before is left out.
    """
    chosen: list[Remedy] = []
    for remedy in remedies:
        if sum(each.saves for each in chosen) > shortage:
            break
        before = changes_of(chosen)
        if not remedy.changes.keys() & before.keys() and is_possible({**before, **remedy.changes}):
            chosen.append(remedy)
    return chosen


def changes_of(remedies: Sequence[Remedy]) -> dict[str, Any]:
    """Return all changes of some remedies together."""
    return {name: value for remedy in remedies for name, value in remedy.changes.items()}
