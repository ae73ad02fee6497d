"""What a forward pass keeps for backward: on the device, or in host memory and back in time.

Tensors leave for the host beside the computation and come back one group (one block) ahead of their use, in the reverse order
in which they were put. Host memory is page-locked, allocated once and used again in every step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wandistiller.memory.host import allocate_host
from wandistiller.memory.lanes import Lane, Ticket, lane_for


@dataclass(eq=False)
class HostPiece:
    """Host memory that a tensor is in; none once it has begun its way back."""

    memory: Tensor | None


@dataclass(eq=False)
class Kept:
    """A tensor that was put away; ``Keeper.get`` gives it back once."""

    tensor: Tensor | None
    host: HostPiece | None = None
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    group: int = 0
    ticket: Ticket = None
    is_away: bool = False
    """In host memory, or on its way there or back."""


class Keeper(Protocol):
    """Somewhere to keep tensors from forward to backward."""

    def begin(self) -> None:
        """Start a new group: what follows is needed together, after all later groups."""
        ...

    def put(self, tensor: Tensor) -> Kept:
        """Keep a tensor."""
        ...

    def get(self, kept: Kept) -> Tensor:
        """Give a tensor back, for good."""
        ...


class DeviceKeeper:
    """Keeps tensors where they are."""

    def begin(self) -> None:
        pass

    def put(self, tensor: Tensor) -> Kept:
        return Kept(tensor)

    def get(self, kept: Kept) -> Tensor:
        tensor, kept.tensor = kept.tensor, None
        assert tensor is not None
        return tensor


class HostKeeper:
    """Sends tensors of some size to host memory; small ones are not worth the way."""

    MIN_BYTES = 2**20

    def __init__(
        self,
        device: torch.device,
        lane: Lane | None = None,
        min_bytes: int = MIN_BYTES,
        allocate: Callable[[int, torch.device], Tensor] = allocate_host,
    ) -> None:
        self._device = device
        self._lane = lane or lane_for(device)
        self._min_bytes = min_bytes
        self._allocate = allocate
        self._pool: dict[int, list[Tensor]] = {}
        self._leaving: deque[tuple[int, Tensor, Ticket]] = deque()
        self._stack: list[tuple[weakref.ref[Kept], HostPiece]] = []
        """What is away, and where; whoever kept it may be gone without asking for it, if there was no backward."""
        self._group = 0

    @property
    def host_bytes(self) -> int:
        """Host memory held, in use or for use again."""
        free = sum(size * len(buffers) for size, buffers in self._pool.items())
        return free + sum(piece.memory.numel() for _, piece in self._stack if piece.memory is not None)

    def begin(self) -> None:
        self._group += 1
        for _, piece in [entry for entry in self._stack if entry[0]() is None]:
            self._give_back(piece)
        self._stack = [entry for entry in self._stack if entry[0]() is not None]
        # What left two groups ago has arrived long since; the computation waits for certain, and then its memory is free.
        while self._leaving and self._leaving[0][0] < self._group - 1:
            _, _, ticket = self._leaving.popleft()
            self._lane.wait(ticket)

    def put(self, tensor: Tensor) -> Kept:
        if tensor.nbytes < self._min_bytes:
            return Kept(tensor, group=self._group)
        source = tensor.detach().contiguous()
        size = source.nbytes
        buffers = self._pool.get(size)
        host = buffers.pop() if buffers else self._allocate(size, self._device)
        target = host.view(source.dtype).view(source.shape)
        ticket = self._lane.start(lambda: target.copy_(source, non_blocking=True), self._lane.mark())
        self._leaving.append((self._group, source, ticket))
        piece = HostPiece(host)
        kept = Kept(None, piece, source.shape, source.dtype, self._group, is_away=True)
        self._stack.append((weakref.ref(kept), piece))
        return kept

    def get(self, kept: Kept) -> Tensor:
        if kept.is_away:
            while self._leaving:  # forward is over
                self._lane.wait(self._leaving.popleft()[2])
            self._fetch(kept)
            self._lane.wait(kept.ticket)
            self._stack = [entry for entry in self._stack if entry[0]() is not kept]
            for reference, _ in reversed(self._stack):
                other = reference()
                if other is not None and other.group < kept.group - 1:
                    break
                if other is not None:
                    self._fetch(other)
        tensor, kept.tensor = kept.tensor, None
        assert tensor is not None
        return tensor

    def _fetch(self, kept: Kept) -> None:
        """Start a tensor's way back, unless it is on it."""
        if kept.tensor is not None:
            return
        assert kept.host is not None and kept.host.memory is not None and kept.shape is not None
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self._device)
        source = kept.host.memory.view(tensor.dtype).view(tensor.shape)
        kept.ticket = self._lane.start(lambda: tensor.copy_(source, non_blocking=True), self._lane.mark())
        kept.tensor = tensor
        self._give_back(kept.host)

    def _give_back(self, piece: HostPiece) -> None:
        """Let memory be used again. Whatever is put there next goes by the same lane, behind what is under way."""
        memory, piece.memory = piece.memory, None
        if memory is not None:
            self._pool.setdefault(memory.numel(), []).append(memory)
