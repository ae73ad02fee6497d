"""How long steps take, without what is done between them now and then: looks at held-out data, pictures, states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wandistiller.memory.rates import synchronise


class StepClock:
    """Runs from when it is made, but for pauses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self._paused = 0.0

    @property
    def seconds(self) -> float:
        """Time that has been spent on steps."""
        return time.perf_counter() - self._start - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what is done meanwhile; what the device was given before and has not done yet counts."""
        synchronise(self._device)
        began = time.perf_counter()
        try:
            yield
        finally:
            synchronise(self._device)
            self._paused += time.perf_counter() - began
