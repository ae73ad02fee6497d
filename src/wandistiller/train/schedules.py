"""Learning rate over global steps: a warm-up, then a course, as a factor of the rate that was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
"""Factor by the share of the steps after the warm-up that are done, from 0 to 1."""


def rate_factor(name: str, step: int, *, warmup_steps: int, num_steps: int) -> float:
    """Return the factor for the step with this number, counted from 0; the warm-up rises to 1 and ends there."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    return SCHEDULES[name](min(done, 1.0))
