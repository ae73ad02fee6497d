"""Signals that ask a run to end, noted for the next moment at which it can end well."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from wandistiller.distributed.failures import is_rank


class Interrupted(Exception):  # noqa: N818  nothing has gone wrong
    """A signal has come: what only looks at the model ends here, and a run that it belongs to saves and is over."""


class Interrupts:
    """Notes the first Ctrl-C or SIGTERM."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the first signal. A second Ctrl-C acts as ever; a second SIGTERM does nothing.

        What stops a job sends it to every process, and torchrun sends it on to its ranks: they get it twice. The same holds
        for Ctrl-C under torchrun.
        """
        before: dict[int, Any] = {}

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number
            if number == signal.SIGINT and not is_rank():
                signal.signal(number, before[number])

        try:
            for each in (signal.SIGINT, signal.SIGTERM):
                before[each] = signal.signal(each, note)
        except ValueError:  # not in the main thread: whoever runs the loop there handles signals
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
