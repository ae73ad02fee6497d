"""Memory over a run: numbers for the metrics, a warning when something grows, and the lines of code that hold it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from wandistiller.memory.allocation_sites import AllocationRecorder
from wandistiller.memory.host import page_locked_bytes
from wandistiller.memory.leak_watch import Leak, LeakWatch
from wandistiller.terminal import say
from wandistiller.train.callbacks import Callback

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop


class WatchMemory(Callback):
    """Looks at memory after every tenth step and says once for each kind that it grows."""

    EVERY = 10

    def __init__(self, watch: LeakWatch | None = None, snapshot: Path | None = None) -> None:
        """``snapshot`` is where PyTorch's memory snapshot goes if device memory grows; recording it costs some time."""
        self._watch = watch or LeakWatch()
        self._snapshot = snapshot
        self._recorder: AllocationRecorder | None = None
        self._told: set[str] = set()
        self.leaks: list[Leak] = []

    def started(self, loop: Loop) -> None:
        if self._snapshot is not None and loop.device.type == "cuda":
            self._recorder = AllocationRecorder()
        elif self._snapshot is not None:
            say("--memory-snapshot needs a CUDA device: PyTorch keeps no record of host memory.")

    def stepped(self, loop: Loop) -> None:
        if loop.step % self.EVERY:
            return
        # The largest tensor of each batch: captions, of any number of lengths, weigh little beside it.
        largest = (max(batch.tensors.values(), key=lambda tensor: tensor.nbytes).shape for batch in loop.batches)
        bucket = tuple(sorted(map(tuple, largest)))
        for kind, num_bytes in self._observe(loop.device).items():
            self._watch.observe(loop.step, kind, num_bytes, bucket)
        if self._recorder is not None and loop.step == -(-self._watch.warmup_steps // self.EVERY) * self.EVERY:
            self._recorder.take_baseline()
        if loop.step % (self.EVERY * 10) == 0:
            for leak in self._watch.leaks():
                self._tell(leak)

    def ended(self, loop: Loop) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def _observe(self, device: torch.device) -> dict[str, int]:
        seen = {"host": psutil.Process().memory_info().rss, "page-locked": page_locked_bytes()}
        if device.type == "cuda":
            seen["device"] = torch.cuda.memory_allocated(device)
        elif device.type == "mps":
            seen["device"] = torch.mps.current_allocated_memory()
        return seen

    def _tell(self, leak: Leak) -> None:
        if leak.kind in self._told:
            return
        self._told.add(leak.kind)
        self.leaks.append(leak)
        say(f"Warning: {leak}.")
        if self._recorder is not None and self._snapshot is not None and leak.kind == "device":
            sites = self._recorder.write(self._snapshot)
            say(f"Wrote {self._snapshot}. " + "; ".join(map(str, sites)))
        elif leak.kind == "device":
            say("Run again with --memory-snapshot to learn which lines hold it.")
