"""What people see while they wait: progress with its rate, the time left and a line of the caller's own (memory, loss)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

Advance = Callable[..., None]

console = Console(stderr=True, emoji=False)
"""For progress and notes; results that programs may read go to standard output."""


class _SecondsEach(ProgressColumn):
    """Seconds for one step, or steps a second when they are quick."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        super().__init__()

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{1 / speed:.2f} s/{self._unit}" if speed < 10 else f"{speed:.0f} {self._unit}s/s")


@contextmanager
def progress(description: str, total: int, unit: str, note: Callable[[], str] | None = None) -> Iterator[Advance]:
    """Show a bar; call what is given after each step, with the number of units if more than one. ``note`` ends the line."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _SecondsEach(unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        speed_estimate_period=600,
    )
    with bar:
        task = bar.add_task(description, total=total, note="")
        yield lambda amount=1: bar.update(task, advance=amount, note=note() if note else "")
        bar.refresh()


def say(message: str) -> None:
    """Print one line for the user."""
    console.print(message, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def hushed(is_quiet: bool) -> Iterator[None]:
    """Print nothing for as long, if asked to: one of several processes speaks for all."""
    before, console.quiet = console.quiet, is_quiet or console.quiet
    try:
        yield
    finally:
        console.quiet = before


def quiet_libraries() -> None:
    """Keep other libraries' bars and notes off the screen; their warnings still come through."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # It advises on import to install kernels for 4-bit weights on the CPU, which nobody here has.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_warning()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
