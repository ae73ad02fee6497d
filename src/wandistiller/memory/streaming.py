"""Block streaming: a model whose blocks live in host memory and visit the device when their turn comes.

Each block's weights lie in one flat host buffer, page-locked for a CUDA device. A ring of slots on the device, allocated
once, receives the blocks ahead of their use, so the device holds ``num_slots`` blocks however deep the model is. What is
not in a block (embeddings, the head) is small and stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.memory.lanes import Lane, Ticket, lane_for

_ALIGNMENT = 256  # bytes; what the CUDA allocator gives, so every view in a slot suits vectorised kernels


@dataclass(frozen=True)
class _Member:
    """One parameter or buffer of a block: the tensor that modules hold, and where its bytes lie in the flat buffer."""

    tensor: Tensor
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        num_bytes = self.shape.numel() * self.dtype.itemsize
        return flat[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)


@dataclass(eq=False)
class _Slot:
    flat: Tensor
    loaded: int | None = None
    """Index of the block whose weights are here or on their way."""
    ready: Ticket = None
    free: Ticket = None
    is_busy: bool = False
    """Between the start of a block's computation on these weights and its end."""


@dataclass
class BlockStream:
    """The blocks of one model, streamed to one device; ``detach`` undoes it completely."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    device: torch.device
    lane: Lane
    num_slots: int
    hosts: list[Tensor] = field(default_factory=list)
    members: list[list[_Member]] = field(default_factory=list)
    slots: list[_Slot] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    outside: list[tuple[Tensor, torch.device]] = field(default_factory=list)

    @property
    def device_bytes(self) -> int:
        """What the streamed model takes on the device: the ring and all that is in no block."""
        return sum(slot.flat.numel() for slot in self.slots) + sum(tensor.nbytes for tensor, _ in self.outside)

    def detach(self) -> None:
        """Give the model its own weights back, in host memory, and take off every hook."""
        for hook in self.hooks:
            hook.remove()
        for index in range(len(self.blocks)):
            self._point(index, self.hosts[index])
        for tensor, home in self.outside:
            tensor.data = tensor.data.to(home)
        self.hooks.clear()
        self.slots.clear()
        self.outside.clear()

    def _before(self, index: int) -> None:
        slot = self._bring(index)
        self.lane.wait(slot.ready)
        slot.is_busy = True
        self._point(index, slot.flat)
        # The next block, also after the last one: a sampler comes back for the first.
        for ahead in range(1, self.num_slots):
            self._bring((index + ahead) % len(self.blocks))

    def _after(self, index: int) -> None:
        slot = next(slot for slot in self.slots if slot.loaded == index)
        slot.free = self.lane.mark()
        slot.is_busy = False
        self._point(index, self.hosts[index])

    def _bring(self, index: int) -> _Slot:
        """Return the slot that has a block's weights or will have them, by a copy started now if need be."""
        for slot in self.slots:
            if slot.loaded == index:
                return slot
        # ``slots`` is kept in the order of last use, so the first idle one holds the block used longest ago.
        slot = next(slot for slot in self.slots if not slot.is_busy)
        slot.ready = self.lane.copy(slot.flat[: self.hosts[index].numel()], self.hosts[index], slot.free)
        slot.loaded = index
        self.slots.remove(slot)
        self.slots.append(slot)
        return slot

    def _point(self, index: int, flat: Tensor) -> None:
        for member in self.members[index]:
            member.tensor.data = member.view(flat)


def stream_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], device: torch.device | str, *, num_slots: int = 2, lane: Lane | None = None
) -> BlockStream:
    """Start streaming the blocks of a model that lies in host memory; ``device`` computes.

    Blocks called in order are there when they are needed; called in another order they are still right, only later.
    """
    device = torch.device(device)
    stream = BlockStream(model, blocks, device, lane or lane_for(device), min(num_slots, len(blocks)))
    pinned = device.type == "cuda"
    for block in blocks:
        members, num_bytes = _lay_out(block)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        for member in members:
            view = member.view(host)
            view.copy_(member.tensor.data)
            member.tensor.data = view
        stream.members.append(members)
        stream.hosts.append(host)
    largest = max(host.numel() for host in stream.hosts)
    stream.slots = [_Slot(torch.empty(largest, dtype=torch.uint8, device=device)) for _ in range(stream.num_slots)]
    in_blocks = {id(member.tensor) for members in stream.members for member in members}
    for tensor in _tensors(model):
        if id(tensor) not in in_blocks:
            stream.outside.append((tensor, tensor.device))
            tensor.data = tensor.data.to(device)
    for index, block in enumerate(blocks):
        stream.hooks.append(block.register_forward_pre_hook(lambda *_, index=index: stream._before(index)))
        stream.hooks.append(block.register_forward_hook(lambda *_, index=index: stream._after(index), always_call=True))
    return stream


def _lay_out(block: nn.Module) -> tuple[list[_Member], int]:
    members, offset = [], 0
    for tensor in _tensors(block):
        members.append(_Member(tensor, tensor.dtype, tensor.shape, offset))
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return members, offset


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    """Return every parameter and buffer once, also where two modules share one."""
    unique = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return unique.values()
