"""A watch on the student: one that collapses is reported as such, however good its loss looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wandistiller.terminal import say
from wandistiller.train.callbacks import Callback

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop

_PATIENCE = 3


@dataclass(frozen=True)
class _Range:
    """Where a number is healthy, and what is said of it otherwise."""

    low: float
    high: float
    found: str
    too_little: str
    too_much: str

    def problem(self, value: float) -> str | None:
        """Say what a number means; None for one in the range."""
        if self.low <= value <= self.high:
            return None
        return f"{self.found.format(value=value)}: {self.too_little if value < self.low else self.too_much}."


# Spread and motion are the student's over the teacher's, saturation is the difference.
_RANGES = {
    "health/spread": _Range(
        0.5, 2.0, "its pictures have {value:.0%} of the spread of the teacher's", "it paints averages", "it paints noise"
    ),
    "health/saturation": _Range(
        -0.05,
        0.05,
        "of its values {value:+.0%} are far out, compared with the teacher's",
        "pictures will be flat",
        "pictures will be burnt",
    ),
    "health/motion": _Range(
        0.3, 3.0, "its clips have {value:.0%} of the motion of the teacher's", "they nearly stand still", "they flicker"
    ),
}


class WatchHealth(Callback):
    """Warns once for each number that has been out of its range for three logging intervals in a row."""

    def __init__(self, warmup_steps: int = 20) -> None:
        self._warmup_steps = warmup_steps
        self._bad: dict[str, int] = {}
        self.warnings: list[str] = []

    def logged(self, loop: Loop, values: Mapping[str, float]) -> None:
        if loop.step < self._warmup_steps:
            return
        for name, healthy in _RANGES.items():
            if name not in values:
                continue
            problem = healthy.problem(values[name])
            self._bad[name] = self._bad.get(name, 0) + 1 if problem is not None else 0
            if self._bad[name] == _PATIENCE:
                warning = f"Warning: the student is collapsing: {problem}"
                self.warnings.append(warning)
                if loop.ranks.is_first:
                    say(warning)
