"""Numbers of a run where people look for them: ``metrics.jsonl``, TensorBoard, and the line under the bar."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wandistiller.files import complete_or_absent
from wandistiller.terminal import console, progress, say
from wandistiller.train.callbacks import Callback

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop


class WriteMetrics(Callback):
    """Appends one JSON object an interval; a resumed run drops the lines of steps that it takes again."""

    def __init__(self, folder: Path, more: Callable[[], Mapping[str, float]] = dict, tensorboard: bool = True) -> None:
        """``more`` gives further numbers at each interval, such as memory."""
        self._folder = folder
        self._more = more
        self._tensorboard = tensorboard
        self._writer: Any = None
        self._start = time.time()

    def started(self, loop: Loop) -> None:
        if not loop.ranks.is_first:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        drop_lines_after(self._folder / "metrics.jsonl", loop.step)
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # What an interrupted run wrote beyond its state is hidden behind the steps that are taken again.
            self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=loop.step + 1)

    def logged(self, loop: Loop, values: Mapping[str, float]) -> None:
        self.write(loop, {**values, **self._more()})

    def write(self, loop: Loop, values: Mapping[str, float]) -> None:
        """Write numbers of the current step."""
        if not loop.ranks.is_first:
            return
        # JSON has no infinities; a gradient norm in float16 can be one.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": loop.step, "time": round(time.time() - self._start, 3), **finite})
        with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, loop.step)

    def ended(self, loop: Loop) -> None:
        if self._writer is not None:
            self._writer.close()


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines of a metrics file up to a step; a last line that was cut short goes too."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    with complete_or_absent(path) as partial:
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


class ShowProgress(Callback):
    """On rank 0: a bar with loss, seconds a step, time left and memory; where nobody watches, a line at each interval.

    A line is ``[00:15:23] Epoch 5/100 | Batch 127/500 | 2.8s/batch | GPU: 14.2GB | ETA: 01:58:45``, then the losses.
    """

    def __init__(self, note: Callable[[], str]) -> None:
        self._note = note
        self._losses = ""
        self._bar: Any = None
        self._advance: Callable[..., None] = lambda *_: None
        self._start = time.monotonic()
        self._first_step = 0

    def started(self, loop: Loop) -> None:
        self._start = time.monotonic()
        self._first_step = loop.step
        if loop.ranks.is_first and console.is_terminal:
            self._bar = progress("Training", loop.options.num_steps, "step", lambda: f"{self._note()} {self._losses}")
            self._advance = self._bar.__enter__()
            self._advance(loop.step)

    def stepped(self, loop: Loop) -> None:
        self._advance()

    def logged(self, loop: Loop, values: Mapping[str, float]) -> None:
        shown = {name: value for name, value in values.items() if name.endswith("loss")}
        self._losses = " ".join(f"{name} {value:.4f}" for name, value in shown.items())
        if loop.ranks.is_first and not console.is_terminal:
            say(f"{self._line(loop, values['seconds_per_step'])} | {self._losses}")

    def saved(self, loop: Loop, path: str) -> None:
        say(f"Saved {path}")

    def ended(self, loop: Loop) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)

    def _line(self, loop: Loop, seconds: float) -> str:
        # By the place in the data: a step may reach into the next epoch, and with another --batch-size steps were others.
        steps_left, per_epoch, per_step = loop.options.num_steps - loop.step, loop.batches_per_epoch, loop.batches_per_step
        epoch, epochs = (-(-position // per_epoch) for position in (loop.position, loop.position + steps_left * per_step))
        batch, batches = (-(-count // per_step) for count in (loop.position - (epoch - 1) * per_epoch, per_epoch))
        passed = time.monotonic() - self._start
        # With all that was done between steps, and will be again.
        left = passed / max(loop.step - self._first_step, 1) * steps_left
        return " | ".join(
            [
                f"[{_clock(passed)}] Epoch {epoch}/{epochs}",
                f"Batch {batch}/{batches}",
                f"{seconds:.1f}s/batch" if seconds >= 0.95 else f"{seconds * 1000:.0f}ms/batch",
                self._note(),
                f"ETA: {_clock(left)}",
            ]
        )


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}"
