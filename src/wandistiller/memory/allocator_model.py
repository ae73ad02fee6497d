"""PyTorch's caching allocator on paper: what it would hold of a card after a sequence of allocations and frees.

It rounds, takes segments from the driver, cuts blocks from them and never gives a segment back while there is room, so what it
holds depends on the order of events, not only on how much is in use. These are its rules for one stream and its default
settings (c10/cuda/CUDACachingAllocator.cpp): small requests (up to 1 MiB) come from segments of 2 MiB, larger ones below 10 MiB
from segments of 20 MiB, others have a segment of their own in steps of 2 MiB; the smallest free block that is large enough is
taken, and cut if enough is left over.

With expandable segments there is one segment for small requests and one for all others. It grows at its end, by steps of 2 and
20 MiB, when no free block is large enough, and the end is cut last. So a request that is larger than every hole costs what the
end lacks, not all of it.
"""

from __future__ import annotations

import bisect
import os
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

    def __init__(self, *, is_expandable: bool = False) -> None:
        self._is_expandable = is_expandable
        self._ends: dict[bool, _Block] = {}
        """Of expandable segments: the last block."""
        self.reserved = self.peak_reserved = 0
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
        block = self._take(size, is_small) or (self._grow if self._is_expandable else self._new_segment)(size, is_small)
        left = block.size - size
        if left >= _LEAST_BLOCK if is_small or self._is_expandable else left > _SMALL:
            rest = _Block(block.segment, block.offset + size, left, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            elif self._is_expandable:
                self._ends[is_small] = rest
            block.after, block.size = rest, size
            self._put(rest, is_small)
        self._used[key] = (block, is_small)
        self.allocated += block.size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
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
        if self._is_expandable and block.after is None:
            self._ends[is_small] = block
        self._put(block, is_small)

    def size(self, key: Hashable) -> int:
        """Return what a tensor takes, rounded as the allocator rounds."""
        return self._used[key][0].size if key in self._used else 0

    def _take(self, size: int, is_small: bool) -> _Block | None:
        pool = self._free[is_small]
        place = bisect.bisect_left(pool, ((size, -1, -1),))
        if place == len(pool):
            return None
        if pool[place][1] is self._ends.get(is_small) and place + 1 < len(pool):
            place += 1  # the end could still grow, so it counts as the largest
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

    def _grow(self, size: int, is_small: bool) -> _Block:
        """Make the last block of a segment large enough."""
        end = self._ends.get(is_small)
        if end is not None and end.is_free:
            self._remove(end, is_small)
            block = end
        else:
            block = _Block(int(is_small), end.offset + end.size if end is not None else 0, 0, before=end)
            if end is not None:
                end.after = block
            self._ends[is_small] = block
        step = _SMALL_SEGMENT if is_small else _MIDDLE_SEGMENT
        mapped = -(-(size - block.size) // step) * step
        self.reserved += mapped
        block.size += mapped
        return block

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


def expandable_segments() -> bool:
    """Say whether PyTorch's allocator is told to use expandable segments, as it reads the environment."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in os.environ:
            settings = dict(item.strip().partition(":")[::2] for item in os.environ[name].split(","))
            return settings.get("expandable_segments", "").strip().lower() in ("true", "1")
    return False
