"""Where streamed blocks live when they are not on the device, and how one gets from there into a slot.

``HostStore`` keeps a block's bytes as they are. ``QuantisedStore`` keeps large matrices in 8 bits, which halves what crosses
the bus; such a block lands in a staging buffer and is multiplied out by the computation itself, just before it is used.
``DiskStore`` (in ``disk_store``) reads blocks from the user's files.
"""

from __future__ import annotations

import functools
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from wandistiller.memory.host import HostBudget, allocate_host, lock_pages
from wandistiller.memory.lanes import Ticket
from wandistiller.memory.layout import BlockLayout, Member, align
from wandistiller.memory.shared_host import share

Read = Callable[[int, Member], Tensor]
"""Gives the values of a member of a block, in host memory and in the member's dtype."""
GiveBack = Callable[[int, dict[str, Tensor]], None]
"""Takes the members of a block that was read, where those after it could not be."""


class BlockStore(Protocol):
    """What a ring of slots needs from the place where blocks live."""

    staging_bytes: int
    """Device bytes that a block takes as it arrives, where that differs from what it is used as; else 0."""

    def fetch(self, index: int) -> Tensor:
        """Return a block's bytes in host memory, ready to be copied; may wait for a disk."""
        ...

    def fetched(self, index: int, ticket: Ticket) -> None:
        """Take note that the bytes are being copied, and free again when the ticket says so."""
        ...

    def expect(self, indices: Sequence[int]) -> None:
        """Prepare for blocks that will be fetched soon, the soonest first."""
        ...

    def unpack(self, index: int, staging: Tensor, flat: Tensor) -> None:
        """Turn what arrived into what is used, as part of the computation; only with ``staging_bytes``."""
        ...

    def views(self, index: int) -> dict[str, Tensor]:
        """Return the block's members in host memory; to write as well, where the store keeps them as they are."""
        ...

    def drop(self, index: int) -> None:
        """Let go of a block that will not be asked for again."""
        ...

    def close(self) -> None:
        """Let go of threads and files."""
        ...


class _InHostMemory(ABC):
    """What stores have in common that hold every block in host memory, ready to be copied."""

    def __init__(self, layouts: Sequence[BlockLayout], give_back: GiveBack | None) -> None:
        self.layouts = layouts
        self._give_back = give_back
        self.flats: list[Tensor] = []
        self._held_back: dict[int, threading.Event] = {}

    @property
    def host_bytes(self) -> int:
        return sum(flat.numel() for flat in self.flats)

    def _keep(
        self,
        sizes: Sequence[int],
        fill: Callable[[int, Tensor], None],
        device: torch.device,
        budget: HostBudget | None,
        shared_as: str | None,
    ) -> None:
        """Make every block's flat bytes, page-locked for a CUDA device; one rank fills what a machine's ranks share."""
        budget = budget or HostBudget()
        if shared_as is None:
            try:
                for index, size in enumerate(sizes):
                    self.flats.append(allocate_host(size, device, budget))
                    fill(index, self.flats[index])
            except BaseException:
                if self._give_back is not None:
                    for done in range(len(self.flats) - 1):
                        self._give_back(done, self.views(done))
                raise
            return

        def filled(name: str) -> Tensor:
            flat = torch.empty(sizes[int(name)], dtype=torch.uint8)
            fill(int(name), flat)
            return flat

        found = share(shared_as, {str(index): (torch.Size([size]), torch.uint8) for index, size in enumerate(sizes)}, filled)
        self.flats = list(found.values())
        for flat in self.flats[:1]:  # all are pieces of one
            lock_pages(flat, device, budget)

    @abstractmethod
    def views(self, index: int) -> dict[str, Tensor]:
        """Return the block's members in host memory."""

    def fetch(self, index: int) -> Tensor:
        event = self._held_back.get(index)
        if event is not None:
            event.wait()
        return self.flats[index]

    def hold_back(self, index: int) -> None:
        """Let whoever fetches a block wait, because it is about to change."""
        self._held_back[index] = threading.Event()

    def let_go(self, index: int) -> None:
        """Say that a block that was held back is ready."""
        self._held_back.pop(index).set()

    def fetched(self, index: int, ticket: Ticket) -> None:
        return  # the bytes stay where they are

    def expect(self, indices: Sequence[int]) -> None:
        return  # all are there

    def drop(self, index: int) -> None:
        self.flats[index] = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        self.flats = []


class HostStore(_InHostMemory):
    """Blocks as flat bytes, page-locked for a CUDA device."""

    staging_bytes = 0

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        read: Read,
        device: torch.device,
        budget: HostBudget | None = None,
        shared_as: str | None = None,
        give_back: GiveBack | None = None,
    ) -> None:
        """Read every block; ``read`` may give the tensors that the model holds now or read them from files.

        ``shared_as`` is a name under which the ranks of a machine have these blocks in common; nobody may change them then.
        """
        super().__init__(layouts, give_back)

        def fill(index: int, flat: Tensor) -> None:
            for member in layouts[index].members:
                member.view(flat).copy_(read(index, member))

        self._keep([layout.num_bytes for layout in layouts], fill, device, budget, shared_as)

    def unpack(self, index: int, staging: Tensor, flat: Tensor) -> None:
        raise AssertionError("host memory holds blocks as they are used")

    def views(self, index: int) -> dict[str, Tensor]:
        self.fetch(index)  # waits for what is held back
        return self.views_at_once(index)

    def views_at_once(self, index: int) -> dict[str, Tensor]:
        """Return the block's members also while it is held back, for whoever changes them."""
        return {member.name: member.view(self.flats[index]) for member in self.layouts[index].members}


def multiply_out(values: Tensor, scales: Tensor, target: Tensor) -> None:
    """Write ``values * scales`` to ``target``: one pass over memory where Triton is there, five times slower where not."""
    if values.is_cuda and has_triton():
        _compiled_multiply()(values, scales, target)
    else:
        torch.mul(values, scales, out=target)


@functools.cache
def _compiled_multiply() -> Callable[[Tensor, Tensor, Tensor], None]:
    def multiply(values: Tensor, scales: Tensor, target: Tensor) -> None:
        target.copy_(values.to(torch.float32) * scales)

    compiled: Callable[[Tensor, Tensor, Tensor], None] = torch.compile(multiply, dynamic=True)
    return compiled


class QuantisedStore(_InHostMemory):
    """Blocks of a frozen role with their matrices in int8, one factor for every 128 values; everything else as it is.

    The matrices come first in a block's layout, dtype by dtype, so that one operation unpacks them all.
    """

    GROUP = 128
    """Values that share a factor; a matrix of another size stays as it is."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        read: Read,
        device: torch.device,
        budget: HostBudget | None = None,
        shared_as: str | None = None,
        give_back: GiveBack | None = None,
    ) -> None:
        super().__init__(layouts, give_back)
        # Rounding ten billion numbers takes a minute on a CPU and a second on the card.
        self._rounding_device = device
        self._counts = [sum(member.shape.numel() for member in self._matrices(layout)) for layout in layouts]

        self.worst_error = 0.0
        self._squared_error = self._squared_norm = 0.0

        def fill(index: int, flat: Tensor) -> None:
            if index == len(layouts):
                flat.view(torch.float64).copy_(torch.tensor([self._squared_error, self._squared_norm, self.worst_error]))
                return
            for member in layouts[index].members:
                self._store(index, member, read(index, member), flat)

        sizes = [self._scales_end(index) + layout.num_bytes - 2 * self._counts[index] for index, layout in enumerate(layouts)]
        # After the blocks, for the ranks that do not round: what rounding changed.
        self._keep([*sizes, 3 * torch.float64.itemsize], fill, device, budget, shared_as)
        self._squared_error, self._squared_norm, self.worst_error = self.flats.pop().view(torch.float64).tolist()
        self.staging_bytes = max(sizes, default=0)

    @property
    def relative_error(self) -> float:
        """The norm of what rounding changed, against the norm of the rounded weights."""
        return float((self._squared_error / self._squared_norm) ** 0.5) if self._squared_norm else 0.0

    @property
    def report(self) -> str:
        """What is to be said to the user."""
        if not any(self._counts):
            return "Nothing is stored in 8 bits: that is for matrices in bfloat16 or float16, and there are none"
        worst = f"the worst by {self.worst_error:.2%}"
        return f"In 8 bits: rounding changes the blocks' matrices by {self.relative_error:.2%}, {worst}"

    @classmethod
    def is_packed(cls, member: Member) -> bool:
        """Say whether a member is stored in 8 bits."""
        is_half = member.dtype in (torch.bfloat16, torch.float16)
        return len(member.shape) == 2 and is_half and member.shape.numel() % cls.GROUP == 0

    def unpack(self, index: int, staging: Tensor, flat: Tensor) -> None:
        count, first = self._counts[index], 0
        # One operation for all, as long as they are of one dtype.
        for dtype, matrices in itertools.groupby(self._matrices(self.layouts[index]), lambda member: member.dtype):
            rows = slice(first, first + sum(member.shape.numel() for member in matrices) // self.GROUP)
            first = rows.stop
            target = flat[: 2 * count].view(dtype).view(-1, self.GROUP)[rows]
            multiply_out(self._values(index, staging)[rows], self._scales(index, staging)[rows], target)
        rest = self.layouts[index].num_bytes - 2 * count
        start = self._scales_end(index)
        flat[2 * count : 2 * count + rest].copy_(staging[start : start + rest])

    def views(self, index: int) -> dict[str, Tensor]:
        """Return the block multiplied out: a copy, because what is stored is rounded."""
        flat = torch.empty(self.layouts[index].num_bytes, dtype=torch.uint8)
        self.unpack(index, self.flats[index], flat)
        return {member.name: member.view(flat) for member in self.layouts[index].members}

    def _matrices(self, layout: BlockLayout) -> Iterator[Member]:
        return (member for member in layout.members if self.is_packed(member))

    def _values(self, index: int, packed: Tensor) -> Tensor:
        return packed[: self._counts[index]].view(torch.int8).view(-1, self.GROUP)

    def _scales(self, index: int, packed: Tensor) -> Tensor:
        start, groups = align(self._counts[index]), self._counts[index] // self.GROUP
        return packed[start : start + 2 * groups].view(torch.bfloat16).view(-1, 1)

    def _scales_end(self, index: int) -> int:
        return align(self._counts[index]) + align(2 * (self._counts[index] // self.GROUP))

    def _store(self, index: int, member: Member, values: Tensor, flat: Tensor) -> None:
        if not self.is_packed(member):
            start = self._scales_end(index) + member.offset - 2 * self._counts[index]
            flat[start : start + member.num_bytes].view(member.dtype).view(member.shape).copy_(values)
            return
        exact = values.to(self._rounding_device, torch.float32).reshape(-1, self.GROUP)
        # 127 is the largest int8. The factor is rounded first, so that values are rounded to what will be multiplied out.
        scale = (exact.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16)
        divisor = scale.float().clamp_min(1e-30)
        rounded = (exact / divisor).round_().clamp_(-127, 127)
        first = member.offset // 2 // self.GROUP
        rows = slice(first, first + exact.shape[0])
        self._scales(index, flat)[rows] = scale
        self._values(index, flat)[rows] = rounded.to(torch.int8)
        error = rounded.mul_(scale.float()).sub_(exact)
        squared_error, squared_norm = error.square().sum().item(), exact.square().sum().item()
        self._squared_error += squared_error
        self._squared_norm += squared_norm
        if squared_norm:
            self.worst_error = max(self.worst_error, (squared_error / squared_norm) ** 0.5)
