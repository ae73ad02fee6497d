"""A watch on the student: one that collapses is reported as such, however good its loss looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from wandistiller.terminal import say
from wandistiller.train.callbacks import Callback

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop

# What is said where a number leaves its range. Spread and motion are the student's over the teacher's.
_RANGES = {
    "health/spread": (
        0.5,
        2.0,
        "its pictures have {value:.0%} of the spread of the teacher's: it paints averages, or noise.",
    ),
    "health/saturation": (
        -0.05,
        0.05,
        "{value:+.0%} of its values are far out, compared with the teacher's: pictures will be burnt or flat.",
    ),
    "health/motion": (0.3, 3.0, "its clips have {value:.0%} of the motion of the teacher's."),
}
_PATIENCE = 3


class WatchHealth(Callback):
    """Warns once for each number that has been out of its range for three logging intervals in a row."""

    def __init__(self, warmup_steps: int = 20) -> None:
        self._warmup_steps = warmup_steps
        self._bad: dict[str, int] = {}
        self.warnings: list[str] = []

    def logged(self, loop: Loop, values: Mapping[str, float]) -> None:
        if loop.step < self._warmup_steps:
            return
        for name, (low, high, words) in _RANGES.items():
            if name not in values:
                continue
            self._bad[name] = self._bad.get(name, 0) + 1 if not low <= values[name] <= high else 0
            if self._bad[name] == _PATIENCE:
                warning = f"Warning: the student is collapsing: {words.format(value=values[name])}"
                self.warnings.append(warning)
                if loop.ranks.is_first:
                    say(warning)
