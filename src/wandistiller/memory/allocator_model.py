"""PyTorch's caching allocator on paper: what it would hold of a card after a sequence of allocations and frees.

It rounds, takes segments from the driver, cuts blocks from them and never gives a segment back while there is room, so what it
holds depends on the order of events, not only on how much is in use. These are its rules for one stream and its default
settings (c10/cuda/CUDACachingAllocator.cpp): small requests (up to 1 MiB) come from segments of 2 MiB, larger ones below 10 MiB
from segments of 20 MiB, others have a segment of their own in steps of 2 MiB; the smallest free block that is large enough is
taken, and cut if enough is left over.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass

MIB = 2**20
_LEAST_BLOCK = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_MIDDLE = 10 * MIB
_MIDDLE_SEGMENT = 20 * MIB
_LARGE_STEP = 2 * MIB


@dataclass(eq=False)
class _Block:
    segment: int
    offset: int
    size: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        return self.size, self.segment, self.offset


class AllocatorModel:
    """Follows allocations and frees: ``reserved`` is what the process would hold, ``allocated`` what is in use."""

    def __init__(self) -> None:
        self.reserved = 0
        self.allocated = self.peak_allocated = 0
        self._num_segments = 0
        self._free: dict[bool, list[tuple[tuple[int, int, int], _Block]]] = {True: [], False: []}
        self._used: dict[Hashable, tuple[_Block, bool]] = {}

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Take room for a tensor; nothing for an empty one."""
        if num_bytes == 0:
            return
        size = -(-num_bytes // _LEAST_BLOCK) * _LEAST_BLOCK
        is_small = size <= _SMALL
        block = self._take(size, is_small) or self._new_segment(size, is_small)
        left = block.size - size
        if left >= _LEAST_BLOCK if is_small else left > _SMALL:
            rest = _Block(block.segment, block.offset + size, left, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest, is_small)
        self._used[key] = (block, is_small)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: Hashable) -> None:
        """Give a tensor's room back; neighbours that are free become one block."""
        if key not in self._used:
            return
        block, is_small = self._used.pop(key)
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove(neighbour, is_small)
                block = self._joined(block, neighbour)
        self._put(block, is_small)

    def size(self, key: Hashable) -> int:
        """Return what a tensor takes, rounded as the allocator rounds."""
        return self._used[key][0].size if key in self._used else 0

    def _take(self, size: int, is_small: bool) -> _Block | None:
        pool = self._free[is_small]
        place = bisect.bisect_left(pool, ((size, -1, -1),))
        if place == len(pool):
            return None
        block = pool.pop(place)[1]
        block.is_free = False
        return block

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            total = _SMALL_SEGMENT
        elif size < _MIDDLE:
            total = _MIDDLE_SEGMENT
        else:
            total = -(-size // _LARGE_STEP) * _LARGE_STEP
        self.reserved += total
        self._num_segments += 1
        return _Block(self._num_segments, 0, total)

    def _put(self, block: _Block, is_small: bool) -> None:
        block.is_free = True
        bisect.insort(self._free[is_small], (block.order, block))  # no two are of the same order

    def _remove(self, block: _Block, is_small: bool) -> None:
        pool = self._free[is_small]
        place = bisect.bisect_left(pool, (block.order,))
        assert pool[place][1] is block
        del pool[place]
        block.is_free = False

    @staticmethod
    def _joined(block: _Block, neighbour: _Block) -> _Block:
        first, second = (neighbour, block) if neighbour.offset < block.offset else (block, neighbour)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first
