"""What this process is doing now: said where it begins, read by whoever has to tell why others wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Doing:
    """One thing, and since when."""

    what: str
    waits_for_ranks: bool = False
    """Whether it can only go on when other ranks do."""
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


_now = Doing("starting")


def now() -> Doing:
    """Return what was begun last."""
    return _now


def note(what: str, *, waits_for_ranks: bool = False) -> None:
    """Say what begins."""
    global _now
    _now = Doing(what, waits_for_ranks)


@contextmanager
def noted(what: str, *, waits_for_ranks: bool = False) -> Iterator[None]:
    """Say what happens inside of the block. If it fails, it stays said: that is what went wrong."""
    before = _now.what
    note(what, waits_for_ranks=waits_for_ranks)
    yield
    note(before)
