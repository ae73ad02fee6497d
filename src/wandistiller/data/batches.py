"""Which samples make which batch: an endless sequence that depends on the seed alone.

Micro-batches are numbered through all epochs. In each epoch every sample comes exactly once, in a new order; samples of
different shapes never share a batch. Ranks and accumulation take the next numbers in turn, so the order does not depend on how
many there are, and a position is all that has to be remembered to go on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wandistiller.data.buckets import AllOne


@dataclass(frozen=True)
class MicroBatch:
    """Samples that are computed together."""

    position: int
    epoch: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class _Epoch:
    """The batches of one epoch: each is a piece of ``samples``. Arrays, as there may be tens of millions."""

    number: int
    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    samples_done: NDArray[np.int64]
    """How many samples there are up to the end of each batch."""


class BatchPlan:
    """The endless sequence of micro-batches over samples of known buckets."""

    def __init__(self, buckets: Sequence[Hashable], batch_size: int, seed: int) -> None:
        """``buckets`` has one entry a sample; those with equal entries may share a batch."""
        numbers: dict[Hashable, int] = {}
        self._buckets: NDArray[np.int64] | None = None
        """Numbers of the buckets; None where all samples are of one."""
        if not isinstance(buckets, AllOne):
            found = np.fromiter((numbers.setdefault(bucket, len(numbers)) for bucket in buckets), np.int64, len(buckets))
            self._buckets = found if len(numbers) > 1 else None
        self.batch_size = batch_size
        self.seed = seed
        self.num_samples = len(buckets)
        self._counts = np.array([self.num_samples]) if self._buckets is None else np.bincount(self._buckets)
        self.batches_per_epoch = int(np.sum(-(-self._counts // batch_size)))
        self._epoch: _Epoch | None = None

    def __getitem__(self, position: int) -> MicroBatch:
        epoch, offset = divmod(position, self.batches_per_epoch)
        found = self._batches(epoch)
        return MicroBatch(position, epoch, tuple(found.samples[found.starts[offset] : found.ends[offset]].tolist()))

    def place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and how many of its samples come before."""
        epoch, offset = divmod(position, self.batches_per_epoch)
        return epoch, int(self._batches(epoch).samples_done[offset - 1]) if offset else 0

    def position_at(self, epoch: int, samples_done: int) -> int:
        """Return the last position in an epoch with at most so many samples before it."""
        offset = int(np.searchsorted(self._batches(epoch).samples_done, samples_done, side="right"))
        return epoch * self.batches_per_epoch + offset

    def _batches(self, epoch: int) -> _Epoch:
        if self._epoch is None or self._epoch.number != epoch:
            self._epoch = None  # before the next one is there
            self._epoch = self._arrange(epoch)
        return self._epoch

    def _arrange(self, epoch: int) -> _Epoch:
        """Go through a new order and give out each bucket's batch when it is full; at the end, those that are not."""
        order, size = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples), self.batch_size
        if self._buckets is None:
            starts = np.arange(0, self.num_samples, size)
            ends = np.minimum(starts + size, self.num_samples)
            return _Epoch(epoch, order, starts, ends, ends)
        # Each bucket's samples together, in the order in which they come; places are those in that order.
        places = np.argsort(self._buckets[order], kind="stable")
        bucket_ends = np.cumsum(self._counts)
        spans = zip(bucket_ends - self._counts, bucket_ends, strict=True)
        bounds = [np.append(np.arange(first, end, size), end) for first, end in spans]
        starts, ends = (np.concatenate([each[part] for each in bounds]) for part in (slice(None, -1), slice(1, None)))
        firsts = np.repeat(places[bucket_ends - self._counts], [len(each) - 1 for each in bounds])
        turn = np.argsort(np.where(ends - starts == size, places[ends - 1], self.num_samples + firsts))
        return _Epoch(epoch, order[places], starts[turn], ends[turn], np.cumsum((ends - starts)[turn]))


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
