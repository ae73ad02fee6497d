"""Which samples make which batch: an endless sequence that depends on the seed alone.

Micro-batches are numbered through all epochs. In each epoch every sample comes exactly once, in a new order; samples of
different shapes never share a batch. Ranks and accumulation take the next numbers in turn, so the order does not depend on how
many there are, and a position is all that has to be remembered to go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MicroBatch:
    """Samples that are computed together."""

    position: int
    epoch: int
    indices: tuple[int, ...]


class BatchPlan:
    """The endless sequence of micro-batches over samples of known buckets."""

    def __init__(self, buckets: Sequence[Hashable], batch_size: int, seed: int) -> None:
        """``buckets`` has one entry a sample; those with equal entries may share a batch."""
        numbers: dict[Hashable, int] = {}
        self._buckets = np.array([numbers.setdefault(bucket, len(numbers)) for bucket in buckets], dtype=np.int64)
        self.batch_size = batch_size
        self.seed = seed
        self.num_samples = len(self._buckets)
        counts = np.bincount(self._buckets) if len(self._buckets) else np.zeros(0, dtype=np.int64)
        self.batches_per_epoch = int(np.sum(-(-counts // batch_size)))
        self._epoch: tuple[int, list[tuple[int, ...]]] | None = None

    def __getitem__(self, position: int) -> MicroBatch:
        epoch, offset = divmod(position, self.batches_per_epoch)
        return MicroBatch(position, epoch, self._batches(epoch)[offset])

    def place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and how many of its samples come before."""
        epoch, offset = divmod(position, self.batches_per_epoch)
        return epoch, sum(map(len, self._batches(epoch)[:offset]))

    def position_at(self, epoch: int, samples_done: int) -> int:
        """Return the last position in an epoch with at most so many samples before it."""
        before = itertools.accumulate(map(len, self._batches(epoch)))
        offset = sum(count <= samples_done for count in before)
        return epoch * self.batches_per_epoch + offset

    def _batches(self, epoch: int) -> list[tuple[int, ...]]:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, list(self._arrange(epoch)))
        return self._epoch[1]

    def _arrange(self, epoch: int) -> Iterator[tuple[int, ...]]:
        """Go through a new order and give out each bucket's batch when it is full; at the end, those that are not."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self._buckets))
        waiting: dict[int, list[int]] = {}
        for index in order.tolist():
            queue = waiting.setdefault(int(self._buckets[index]), [])
            queue.append(index)
            if len(queue) == self.batch_size:
                yield tuple(queue)
                queue.clear()
        yield from (tuple(queue) for queue in waiting.values() if queue)


@dataclass(frozen=True)
class StepPlan:
    """What one optimiser step computes, over all ranks."""

    plan: BatchPlan
    world_size: int
    accumulation: int

    @property
    def batches_per_step(self) -> int:
        return self.world_size * self.accumulation

    def num_samples(self, position: int) -> int:
        """Return the samples of all ranks in the step that begins at a position."""
        return sum(len(self.plan[position + offset].indices) for offset in range(self.batches_per_step))

    def mine(self, position: int, rank: int) -> list[MicroBatch]:
        """Return a rank's micro-batches of the step that begins at a position."""
        return [self.plan[position + turn * self.world_size + rank] for turn in range(self.accumulation)]
