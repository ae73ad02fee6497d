"""Streamed blocks straight from the user's own files: no second copy of the weights, host memory for a few blocks.

Threads read ahead into page-locked buffers, in pieces, so that a fast disk has several requests to work on. Tensors that the
file holds as they are used are read in place; others (another dtype, scaled 8 bits) are converted by the reading thread.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.errors import CheckpointError
from wandistiller.memory.block_store import Read
from wandistiller.memory.host import allocate_host
from wandistiller.memory.lanes import Lane, Ticket, lane_for
from wandistiller.memory.layout import BlockLayout, Member
from wandistiller.models.weight_files import Entry

Locate = Callable[[int, Member], Entry | None]
"""Says where a member's bytes lie as they are used; None where they have to be converted."""

PIECE_BYTES = 16 * 2**20
NUM_THREADS = 8
NUM_BUFFERS = 4


@dataclass(eq=False)
class _Buffer:
    flat: Tensor
    holds: int | None = None
    pieces: list[Future[None]] = field(default_factory=list)
    """Reads under way, or done."""
    copied: Ticket = None
    """When the device has what was here last."""
    is_taken: bool = False
    """Asked for and not yet handed to a copy."""


def _give_up(buffer: _Buffer) -> None:
    """Return when nobody writes to a buffer any more; it holds nothing then, and an error of its reads is forgotten."""
    for piece in buffer.pieces:
        piece.cancel() or piece.exception()
    buffer.holds, buffer.is_taken, buffer.pieces = None, False, []


class DiskStore:
    """Blocks in the files that they came in."""

    staging_bytes = 0

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        read: Read,
        device: torch.device,
        locate: Locate,
        *,
        num_buffers: int = NUM_BUFFERS,
        num_threads: int = NUM_THREADS,
        lane: Lane | None = None,
    ) -> None:
        """Open the files; ``read`` gives those tensors that ``locate`` says have to be converted."""
        self.layouts = layouts
        self._read = read
        self._locate = locate
        self._lane = lane or lane_for(device)
        self._files: dict[Path, int] = {}
        largest = max((layout.num_bytes for layout in layouts), default=0)
        self._buffers = [_Buffer(allocate_host(largest, device)) for _ in range(max(num_buffers, 2))]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="wandistiller-disk")
        # All now: a file that is replaced later would be read where the old one's tensors were.
        for index, layout in enumerate(layouts):
            for entry in filter(None, (locate(index, member) for member in layout.members)):
                self._descriptor(entry.file)

    @property
    def host_bytes(self) -> int:
        return sum(buffer.flat.numel() for buffer in self._buffers)

    def fetch(self, index: int) -> Tensor:
        buffer = self._begin(index) or self._begin(index, must=True)
        assert buffer is not None
        try:
            for piece in buffer.pieces:
                piece.result()
        except BaseException:
            _give_up(buffer)  # it is read again, should anybody ask
            raise
        return buffer.flat[: self.layouts[index].num_bytes]

    def fetched(self, index: int, ticket: Ticket) -> None:
        buffer = next(buffer for buffer in self._buffers if buffer.holds == index)
        buffer.copied, buffer.is_taken = ticket, False

    def expect(self, indices: Sequence[int]) -> None:
        for index in indices:
            if self._begin(index) is None:
                return

    def unpack(self, index: int, staging: Tensor, flat: Tensor) -> None:
        raise AssertionError("blocks are read as they are used")

    def views(self, index: int) -> dict[str, Tensor]:
        """Return the block read once more: a copy, because the files are the user's."""
        flat = torch.empty(self.layouts[index].num_bytes, dtype=torch.uint8)
        for work in self._pieces(index, flat):
            work()
        return {member.name: member.view(flat) for member in self.layouts[index].members}

    def drop(self, index: int) -> None:
        pass  # its files are the user's

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _begin(self, index: int, *, must: bool = False) -> _Buffer | None:
        """Return the buffer that has a block or is getting it, started now if one is free; None where all are in use."""
        for buffer in self._buffers:
            if buffer.holds == index:
                buffer.is_taken = True
                return buffer
        free = [buffer for buffer in self._buffers if must or not buffer.is_taken]
        if not free:
            return None
        buffer = free[0]
        self._buffers.remove(buffer)
        self._buffers.append(buffer)  # the one used longest ago stands first
        _give_up(buffer)  # a block that was expected and never fetched
        buffer.holds, buffer.is_taken = index, True
        copied = buffer.copied
        buffer.pieces = [self._threads.submit(self._read_piece, work, copied) for work in self._pieces(index, buffer.flat)]
        return buffer

    def _read_piece(self, work: Callable[[], None], copied: Ticket) -> None:
        self._lane.wait_on_host(copied)  # the device may still be copying what was here
        work()

    def _pieces(self, index: int, flat: Tensor) -> list[Callable[[], None]]:
        """Return the reads that fill a buffer with a block."""
        pieces: list[Callable[[], None]] = []
        stretches: list[_Stretch] = []
        for member in self.layouts[index].members:
            entry = self._locate(index, member)
            if entry is None:
                pieces.append(functools.partial(self._convert, index, member, flat))
                continue
            view = memoryview(flat[member.offset : member.offset + member.num_bytes].numpy())
            for start in range(0, member.num_bytes, PIECE_BYTES):
                part = view[start : start + PIECE_BYTES]
                stretches.append(_Stretch(entry.file, entry.offset + start, [part], entry.name))
        pieces += [functools.partial(_read_exactly, self._descriptor(each.file), each) for each in _joined(stretches)]
        return pieces

    def _convert(self, index: int, member: Member, flat: Tensor) -> None:
        member.view(flat).copy_(self._read(index, member))

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        return self._files[file]


@dataclass
class _Stretch:
    """Neighbouring bytes of a file and the places in memory that they go to."""

    file: Path
    offset: int
    targets: list[memoryview]
    first_tensor: str

    @property
    def num_bytes(self) -> int:
        return sum(len(target) for target in self.targets)


def _joined(stretches: list[_Stretch]) -> list[_Stretch]:
    """Join what lies side by side in a file, up to the size of a piece: a block's many small tensors become few reads."""
    joined: list[_Stretch] = []
    for each in sorted(stretches, key=lambda stretch: (stretch.file, stretch.offset)):
        last = joined[-1] if joined else None
        is_next = last is not None and last.file == each.file and last.offset + last.num_bytes == each.offset
        if last is not None and is_next and last.num_bytes + each.num_bytes <= PIECE_BYTES and len(last.targets) < 64:
            last.targets += each.targets
        else:
            joined.append(each)
    return joined


def _read_exactly(descriptor: int, stretch: _Stretch) -> None:
    offset, left = stretch.offset, list(stretch.targets)
    while left:
        count = os.preadv(descriptor, left, offset)
        if count == 0:
            raise CheckpointError(
                f"{stretch.file} ends inside tensor '{stretch.first_tensor}' or one after it.",
                why="the file became shorter while it was in use.",
                fix="Copy or download the file again, and do not change it while a model streams from it.",
            )
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left and count:
            left[0] = left[0][count:]
