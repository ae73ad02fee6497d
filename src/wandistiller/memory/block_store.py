"""Where streamed blocks live when they are not on the device, and how one gets from there into a slot.

A store hands out a *delivery*: something that runs on the copy lane and leaves the block's bytes in a slot. ``HostStore``
keeps the bytes as they are; ``QuantisedStore`` keeps large matrices in 8 bits and multiplies them out on the device, which
halves what crosses the bus. ``DiskStore`` (in ``disk_store``) reads them from the user's files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wandistiller.memory.host import HostBudget, allocate_host
from wandistiller.memory.lanes import Ticket
from wandistiller.memory.layout import BlockLayout, Member, align

Read = Callable[[int, Member], Tensor]
"""Gives the values of a member of a block, in host memory and in the member's dtype."""

Delivery = Callable[[Tensor, Tensor], None]
"""Fills a slot (first argument) by way of its staging bytes (second argument), on the lane's stream."""


class BlockStore(Protocol):
    """What a ring of slots needs from the place where blocks live."""

    staging_bytes: int
    """Device bytes beside each slot that a delivery needs."""

    def fetch(self, index: int) -> Delivery:
        """Return what brings a block into a slot; may wait for a disk."""
        ...

    def delivered(self, index: int, ticket: Ticket) -> None:
        """Take note that the delivery is on its way and done with host memory when the ticket says so."""
        ...

    def expect(self, indices: Sequence[int]) -> None:
        """Prepare for blocks that will be fetched soon, the soonest first."""
        ...

    def views(self, index: int) -> dict[str, Tensor]:
        """Return the block's members in host memory, to read and to write; raise where there are none."""
        ...

    def close(self) -> None:
        """Let go of threads and files."""
        ...


class HostStore:
    """Blocks as flat bytes in host memory, page-locked for a CUDA device."""

    staging_bytes = 0

    def __init__(
        self, layouts: Sequence[BlockLayout], read: Read, device: torch.device, budget: HostBudget | None = None
    ) -> None:
        """Read every block; ``read`` may give the tensors that the model holds now or read them from files."""
        self.layouts = layouts
        self.flats: list[Tensor] = []
        budget = budget or HostBudget()
        for index, layout in enumerate(layouts):
            flat = allocate_host(layout.num_bytes, device, budget)
            for member in layout.members:
                member.view(flat).copy_(read(index, member))
            self.flats.append(flat)

    @property
    def host_bytes(self) -> int:
        return sum(flat.numel() for flat in self.flats)

    def fetch(self, index: int) -> Delivery:
        flat = self.flats[index]

        def deliver(slot: Tensor, staging: Tensor) -> None:
            slot[: flat.numel()].copy_(flat, non_blocking=True)

        return deliver

    def delivered(self, index: int, ticket: Ticket) -> None:
        pass

    def expect(self, indices: Sequence[int]) -> None:
        pass

    def views(self, index: int) -> dict[str, Tensor]:
        return {member.name: member.view(self.flats[index]) for member in self.layouts[index].members}

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Packed:
    """A member in the 8-bit store: where its values lie, and where its row factors, if it is quantised."""

    member: Member
    offset: int
    scale_offset: int | None

    @property
    def num_bytes(self) -> int:
        return self.member.shape.numel() if self.scale_offset is not None else self.member.num_bytes

    def values(self, flat: Tensor) -> Tensor:
        dtype = torch.int8 if self.scale_offset is not None else self.member.dtype
        return flat[self.offset : self.offset + self.num_bytes].view(dtype).view(self.member.shape)

    def scales(self, flat: Tensor) -> Tensor:
        assert self.scale_offset is not None
        rows = self.member.shape[0]
        return flat[self.scale_offset : self.scale_offset + 4 * rows].view(torch.float32).view(rows, 1)


class QuantisedStore:
    """Blocks of a frozen role with their matrices in int8 and one factor a row; everything else as it is."""

    MIN_NUMEL = 4096
    """Smaller matrices are not worth the rounding."""

    def __init__(
        self, layouts: Sequence[BlockLayout], read: Read, device: torch.device, budget: HostBudget | None = None
    ) -> None:
        self.layouts = layouts
        self.flats: list[Tensor] = []
        self._packed = [self._pack(layout) for layout in layouts]
        self._squared_error = self._squared_norm = 0.0
        self.worst_error = 0.0
        budget = budget or HostBudget()
        for index, packed in enumerate(self._packed):
            flat = allocate_host(packed[-1].offset + align(packed[-1].num_bytes), device, budget)
            for item in packed:
                self._store(item, read(index, item.member), flat)
            self.flats.append(flat)
        self.staging_bytes = max(flat.numel() for flat in self.flats)

    @property
    def host_bytes(self) -> int:
        return sum(flat.numel() for flat in self.flats)

    @property
    def relative_error(self) -> float:
        """The norm of what rounding changed, against the norm of the rounded weights."""
        return float((self._squared_error / self._squared_norm) ** 0.5) if self._squared_norm else 0.0

    def fetch(self, index: int) -> Delivery:
        flat, packed = self.flats[index], self._packed[index]

        def deliver(slot: Tensor, staging: Tensor) -> None:
            staging = staging[: flat.numel()]
            staging.copy_(flat, non_blocking=True)
            for item in packed:
                target = item.member.view(slot)
                if item.scale_offset is None:
                    target.copy_(item.values(staging))
                else:
                    torch.mul(item.values(staging), item.scales(staging), out=target)

        return deliver

    def delivered(self, index: int, ticket: Ticket) -> None:
        pass

    def expect(self, indices: Sequence[int]) -> None:
        pass

    def views(self, index: int) -> dict[str, Tensor]:
        """Return the block multiplied out; a copy, because what is stored is rounded."""
        flat = self.flats[index]
        return {
            item.member.name: item.values(flat)
            if item.scale_offset is None
            else (item.values(flat) * item.scales(flat)).to(item.member.dtype)
            for item in self._packed[index]
        }

    def close(self) -> None:
        pass

    def _pack(self, layout: BlockLayout) -> list[_Packed]:
        packed, offset = [], 0
        for member in layout.members:
            is_matrix = len(member.shape) == 2 and member.dtype.is_floating_point and member.shape.numel() >= self.MIN_NUMEL
            scale_offset = offset if is_matrix else None
            if is_matrix:
                offset += align(4 * member.shape[0])
            packed.append(_Packed(member, offset, scale_offset))
            offset += align(packed[-1].num_bytes)
        return packed

    def _store(self, item: _Packed, values: Tensor, flat: Tensor) -> None:
        if item.scale_offset is None:
            item.values(flat).copy_(values)
            return
        exact = values.to(torch.float32)
        # 127 is the largest int8; an all-zero row has any factor.
        scale = (exact.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-30)
        rounded = (exact / scale).round_().clamp_(-127, 127)
        item.scales(flat).copy_(scale)
        item.values(flat).copy_(rounded)
        error = rounded.mul_(scale).sub_(exact)
        squared_error, squared_norm = error.square().sum().item(), exact.square().sum().item()
        self._squared_error += squared_error
        self._squared_norm += squared_norm
        if squared_norm:
            self.worst_error = max(self.worst_error, (squared_error / squared_norm) ** 0.5)
