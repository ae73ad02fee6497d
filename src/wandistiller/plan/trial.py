"""A few real steps of what was predicted, with random weights: memory and time as they are."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from wandistiller.errors import UsageError
from wandistiller.memory.host import page_locked_bytes
from wandistiller.memory.rates import synchronise
from wandistiller.memory.raw_reads import forget_files, forgetting
from wandistiller.models.devices import free_memory
from wandistiller.plan.trial_models import Ends
from wandistiller.plan.trial_steps import STEPS, WARM_UPS, Work
from wandistiller.units import Bytes

_MOST_WARM_UPS = 24
"""Where steps of float16 are left out until its losses are scaled less."""
_LEAST_SECONDS = 1.0
"""How long a card is measured at least."""


@dataclass(frozen=True)
class Measured:
    """What steps took."""

    allocated: Bytes
    reserved: Bytes
    page_locked: Bytes
    seconds: float
    """Of a step, the median."""


def try_out(
    work: Work, device: torch.device, *, num_steps: int = 3, between: Callable[[Sequence[Path]], None] | None = None
) -> Measured:
    """Take a few steps on a device, and more where they are so short that a busy host makes some much longer.

    ``between`` is called after each step that counts, with the files that it has read: a look at a machine that others use.
    Of files the next step's first blocks are read meanwhile, so a step that does not count uses them up.
    """
    free_memory(device)
    with Ends() as ends:
        step = STEPS[type(work)](work, device, ends)
        ends.enter_context(forgetting(ends.files))
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        numbers = itertools.count(_warm_up(step, ends))
        times = list[float]()
        while len(times) < num_steps or (sum(times) < _LEAST_SECONDS and device.type == "cuda"):
            forget_files(ends.files)  # of small models, which are read again sooner than is looked for
            synchronise(device)
            start = time.perf_counter()
            step(next(numbers))
            synchronise(device)
            times.append(time.perf_counter() - start)
            if between is not None:
                between(ends.files)
            if between is not None and ends.files:
                step(next(numbers))
        is_cuda = device.type == "cuda"
        measured = Measured(
            Bytes(torch.cuda.max_memory_allocated(device) if is_cuda else 0),
            Bytes(torch.cuda.max_memory_reserved(device) if is_cuda else 0),
            page_locked_bytes(),
            statistics.median(times),
        )
        del step
    gc.collect()
    free_memory(device)
    return measured


def _warm_up(step: Callable[[int], None], ends: Ends) -> int:
    """Take steps until one is as all others will be; return how many that were."""
    for number in range(_MOST_WARM_UPS):
        before = ends.loss_scales
        step(number)
        is_taken = all(scale >= old for scale, old in zip(ends.loss_scales, before, strict=True))
        if number + 1 >= WARM_UPS and is_taken:
            return number + 1
    raise UsageError(
        f"None of {_MOST_WARM_UPS} steps in float16 could be taken.",
        why="gradients of random weights are not finite there, however little the loss is scaled.",
        fix="Try it in bfloat16, which takes the same memory.",
    )
