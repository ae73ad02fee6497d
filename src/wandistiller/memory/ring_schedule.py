"""When the blocks of a ring come and when they compute: ``block_stream`` in seconds, without a device.

The bus brings one block after the other, each as soon as its slot is free; the computation waits for what it needs. Where both
take about as long, neither alone says how long a pass takes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from wandistiller.memory.residents import spread_evenly


@dataclass(frozen=True)
class Ring:
    """A model's blocks, of which some visit the device."""

    num_blocks: int
    num_resident: int
    num_slots: int
    is_packed: bool = False
    """Whether blocks are unpacked where they compute, so that a slot is free as soon as that is done."""
    is_trained: bool = False
    """Whether steps change blocks, so that they have to come again."""

    @property
    def num_streamed(self) -> int:
        return max(self.num_blocks - self.num_resident, 0)


def ring_seconds(ring: Ring, forward: float, backward: float, copy: float, unpack: float = 0.0) -> tuple[float, float]:
    """Return the time of forward and of backward, of steps that follow each other.

    Given is what all blocks take to compute in each, 0 if there is no backward, and those that visit to be copied and unpacked
    once.
    """
    if ring.num_streamed == 0:
        return forward, backward
    clock = _Clock(ring, copy / ring.num_streamed, unpack / ring.num_streamed)
    order = range(ring.num_blocks)
    # The first step begins with empty slots.
    for _ in range(2):
        start = clock.now
        if ring.is_trained:
            clock.forget()
        for index in order:
            clock.visit(index, 1, forward / ring.num_blocks, goes_on=not backward)
        turned = clock.now
        for index in reversed(order) if backward else ():
            clock.visit(index, -1, backward / ring.num_blocks)
    return turned - start, clock.now - turned


class _Clock:
    """A computation and a bus beside it."""

    def __init__(self, ring: Ring, copy: float, unpack: float) -> None:
        self.now = 0.0
        """When all that was asked for until here is computed."""
        self._ring = ring
        self._copy = copy
        self._unpack = unpack
        kept = spread_evenly(ring.num_blocks, ring.num_resident)
        self._streamed = [index for index in range(ring.num_blocks) if index not in kept]
        self._num_slots = min(ring.num_slots, ring.num_streamed)
        self._bus = 0.0
        self._holds: dict[int, int] = {}
        self._ready: dict[int, float] = {}
        self._emptied: dict[int, float] = {}
        self._unpacked: int | None = None

    def forget(self) -> None:
        """Have nothing of what is in the slots."""
        self._holds.clear()

    def visit(self, index: int, step: int, seconds: float, *, goes_on: bool = False) -> None:
        """Compute a block; ``goes_on`` says that the first one follows the last."""
        place = bisect_left(self._streamed, index)
        is_streamed = place < len(self._streamed) and self._streamed[place] == index
        if not is_streamed and step < 0:
            place -= 1
        self._start(range(place, place + step * self._num_slots, step), goes_on)
        if is_streamed:
            slot = place % self._num_slots
            self.now = max(self.now, self._ready[slot])
            if place != self._unpacked:
                self.now += self._unpack
                self._emptied[slot] = self.now
            self._unpacked = place
        self.now += seconds

    def _start(self, places: range, goes_on: bool) -> None:
        count, taken = len(self._streamed), set[int]()
        for place in (each % count for each in places if 0 <= each < count or goes_on):
            slot = place % self._num_slots
            if slot not in taken and self._holds.get(slot) != place:
                free = self._emptied.get(slot, 0.0) if self._ring.is_packed else self.now
                self._bus = self._ready[slot] = max(self._bus, free) + self._copy
                self._holds[slot] = place
            taken.add(slot)
