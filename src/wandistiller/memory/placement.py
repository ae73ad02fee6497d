"""Placements: where a role's weights live, predicted in bytes and then done.

A placement says beforehand what it takes on each device, in host memory (page-locked apart) and on disk; attaches to a model
that is loaded or still on the meta device; and returns something that undoes it. What the weights were chosen to spare never
holds the whole model, not even while loading. Variants register themselves by name; one contract test runs over all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from wandistiller.errors import UsageError, nearest
from wandistiller.memory.block_store import QuantisedStore
from wandistiller.memory.block_stream import BlockStream
from wandistiller.memory.disk_store import NUM_BUFFERS
from wandistiller.memory.host import HostBudget, whole_pages
from wandistiller.memory.layout import BlockLayout, align, bind, lay_out, named_tensors, travelling
from wandistiller.memory.monitor import device_memory
from wandistiller.memory.residents import spread_evenly
from wandistiller.memory.ring_schedule import Ring
from wandistiller.memory.shared_host import ranks_here, share
from wandistiller.memory.streaming import ReadTensor, stream_blocks
from wandistiller.models.weight_files import Entry
from wandistiller.terminal import say
from wandistiller.units import Bytes


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to be placed: loaded in host memory, or on the meta device with ways to get its tensors by name."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    read: ReadTensor | None = None
    locate: Callable[[str], Entry | None] | None = None
    """Where a tensor lies in the user's files as it is used; None for one that has to be converted."""
    key: str = ""
    """What tells the weights apart from all others, for ranks that share them."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes that a placement takes, by where."""

    devices: Mapping[str, Bytes] = field(default_factory=dict)
    """On each device, by its name."""
    host: Bytes = field(default_factory=lambda: Bytes(0))
    """In ordinary host memory."""
    page_locked: Bytes = field(default_factory=lambda: Bytes(0))
    disk: Bytes = field(default_factory=lambda: Bytes(0))
    """In files that have to stay where they are."""

    @property
    def device(self) -> Bytes:
        """On all devices together."""
        return sum(self.devices.values(), Bytes(0))


@dataclass
class Placed:
    """A model where it was put; ``detach`` brings its weights back into ordinary host memory and leaves no trace."""

    footprint: Footprint
    detach: Callable[[], None]
    note: str = ""
    """What was chosen and why, where there was a choice."""
    name: str = ""
    """What was chosen, where there was a choice."""
    stream: BlockStream | None = None
    """The streamed blocks, where they are."""
    keep_up: Callable[[], str] = lambda: ""
    """Call once between steps, when the first are done: brings onto the device what the bus is too slow for, if there is
    room, and says so; does nothing for a placement that has no such choice."""


class Placement(ABC):
    """One way for weights to live."""

    @abstractmethod
    def predict(self, subject: Subject, device: torch.device) -> Footprint:
        """Return what attaching will take, from shapes alone."""

    @abstractmethod
    def attach(self, subject: Subject, device: torch.device) -> Placed:
        """Put the weights where they belong."""


MARGIN = Bytes(2**30)
"""Least that is left free of a device when blocks are kept there because there is room."""

PLACEMENTS: dict[str, type[Placement]] = {}


def register_placement(name: str) -> Callable[[type[Placement]], type[Placement]]:
    """Make a placement available under ``name``."""

    def register(placement: type[Placement]) -> type[Placement]:
        PLACEMENTS[name] = placement
        return placement

    return register


def find_placement(name: str, **options: Any) -> Placement:
    """Return a placement by name with its options."""
    if name not in PLACEMENTS:
        raise UsageError(f"There is no placement '{name}'{nearest(name, PLACEMENTS)}", fix=f"Use {', '.join(PLACEMENTS)}.")
    return PLACEMENTS[name](**options)


@register_placement("gpu")
class OnDevice(Placement):
    """All weights on the device."""

    def predict(self, subject: Subject, device: torch.device) -> Footprint:
        return Footprint(devices={str(device): Bytes(_total(named_tensors(subject.model)))})

    def attach(self, subject: Subject, device: torch.device) -> Placed:
        _move(subject, device)
        return Placed(self.predict(subject, device), lambda: _move(subject, torch.device("cpu")))


@register_placement("cpu")
class OnHost(Placement):
    """All weights in host memory, and the CPU computes; inputs and outputs travel.

    Weights that lie in the user's files as they are used are mapped from there, and others are put into shared memory where
    a machine has several ranks: all of them share one copy.
    """

    def predict(self, subject: Subject, device: torch.device) -> Footprint:
        tensors = named_tensors(subject.model)
        mapped = [item for item in tensors if subject.locate is not None and subject.locate(item[0]) is not None]
        is_fixed = not any(each.requires_grad for _, each in tensors)
        host = -(-_total(tensors) // (ranks_here() if is_fixed else 1))  # this rank's part of what is there once
        return Footprint(host=Bytes(host), disk=Bytes(_total(mapped)))

    def attach(self, subject: Subject, device: torch.device) -> Placed:
        cpu = torch.device("cpu")
        footprint = self.predict(subject, device)
        _move(subject, cpu)
        own = {parameter.dtype for parameter in subject.model.parameters()}
        main = _main_dtype(subject.model)

        def send_in(value: Any) -> Any:
            """Take to the host, in the role's dtype there if it has no weights in the value's own."""
            is_foreign = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 and value.dtype not in own
            return value.to(cpu, main if is_foreign else value.dtype) if isinstance(value, Tensor) else value

        def inward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map(send_in, (args, kwargs))

        def outward(module: nn.Module, args: Any, output: Any) -> Any:
            return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, output)

        hooks = [
            subject.model.register_forward_pre_hook(inward, with_kwargs=True),
            subject.model.register_forward_hook(outward),
        ]

        def detach() -> None:
            for hook in hooks:
                hook.remove()

        return Placed(footprint, detach)


@register_placement("offload")
@dataclass(frozen=True, kw_only=True)
class Streamed(Placement):
    """Blocks in page-locked host memory, streamed to the device ahead of their use."""

    num_slots: int = 2
    resident: int | Literal["auto"] = 0
    """Blocks that stay on the device, spread evenly; 'auto' begins with none and lets ``Placed.keep_up`` choose."""
    quantise: bool = False
    """Keep matrices in 8 bits; for frozen roles."""
    train: bool = False
    """Train whole blocks; their gradients go to host memory."""
    max_page_locked: Bytes | None = None
    """Most that may be page-locked; the rest stays pageable and copies slower."""

    def predict(self, subject: Subject, device: torch.device) -> Footprint:
        plan = StreamPlan(subject, self.num_slots, self._resident, self.quantise, self.train)
        host = sum(whole_pages(plan.stored_bytes(layout)) for layout in plan.layouts)
        if self._is_shared(subject):
            host = -(-host // ranks_here())  # this rank's part of what is there once
        locked = host if device.type == "cuda" else 0
        if self.max_page_locked is not None:
            locked = min(locked, self.max_page_locked)
        return Footprint(devices={str(device): Bytes(plan.device_bytes)}, host=Bytes(host - locked), page_locked=Bytes(locked))

    def attach(self, subject: Subject, device: torch.device) -> Placed:
        footprint = self.predict(subject, device)
        stream = stream_blocks(
            subject.model,
            subject.blocks,
            device,
            num_slots=self.num_slots,
            resident=self._resident,
            read=subject.read,
            quantise=self.quantise,
            budget=HostBudget(self.max_page_locked),
            shared_as=f"{subject.key} {self._resident} {self.quantise}" if self._is_shared(subject) else None,
            train=self.train,
        )
        if isinstance(stream.store, QuantisedStore):
            say(stream.store.report)
        stream.is_timed = self.resident == "auto"
        placed = Placed(footprint, stream.detach, stream=stream)
        placed.keep_up = lambda: _keep_up(stream, placed) if self.resident == "auto" else ""
        return placed

    @property
    def _resident(self) -> int:
        return 0 if self.resident == "auto" else self.resident

    def _is_shared(self, subject: Subject) -> bool:
        """Whether the ranks of this machine have the blocks in common: of a model that nobody changes."""
        is_fixed = not self.train and not any(each.requires_grad for each in subject.model.parameters())
        return ranks_here() > 1 and is_fixed and subject.read is not None and bool(subject.key)


@register_placement("disk")
@dataclass(frozen=True, kw_only=True)
class FromDisk(Placement):
    """Blocks in the user's own files, read ahead and streamed to the device; host memory for a few blocks."""

    num_slots: int = 2
    resident: int = 0

    def predict(self, subject: Subject, device: torch.device) -> Footprint:
        plan = StreamPlan(subject, self.num_slots, self.resident, quantise=False)
        buffers = NUM_BUFFERS * whole_pages(max((layout.num_bytes for layout in plan.layouts), default=0))
        locked = buffers if device.type == "cuda" else 0
        return Footprint(
            devices={str(device): Bytes(plan.device_bytes)},
            host=Bytes(buffers - locked),
            page_locked=Bytes(locked),
            disk=Bytes(sum(layout.num_bytes for layout in plan.layouts)),
        )

    def attach(self, subject: Subject, device: torch.device) -> Placed:
        if subject.read is None or subject.locate is None:
            raise UsageError("Only a model that is not loaded yet can be streamed from disk.", fix="Point to its files.")
        footprint = self.predict(subject, device)
        stream = stream_blocks(
            subject.model,
            subject.blocks,
            device,
            num_slots=self.num_slots,
            resident=self.resident,
            read=subject.read,
            locate=subject.locate,
        )
        return Placed(footprint, stream.detach, stream=stream)


def _keep_up(stream: BlockStream, placed: Placed) -> str:
    memory = device_memory(stream.device)
    added = stream.keep_up(max(memory.free - max(MARGIN, memory.total // 20), 0))
    if not added:
        return ""
    devices = {**placed.footprint.devices, str(stream.device): Bytes(stream.device_bytes)}
    placed.footprint = replace(placed.footprint, devices=devices)
    return f"{added} of {len(stream.blocks)} blocks stay on {stream.device}, because the bus is slower than the computation"


class StreamPlan:
    """The layouts that streaming would make, from shapes alone."""

    def __init__(self, subject: Subject, num_slots: int, resident: int, quantise: bool, train: bool = False) -> None:
        kept = spread_evenly(len(subject.blocks), resident)
        streamed = [block for index, block in enumerate(subject.blocks) if index not in kept]
        self.layouts: list[BlockLayout] = [lay_out(each) for each in travelling(subject.model, streamed, train=train)]
        self._quantise = quantise
        self.ring = Ring(len(subject.blocks), len(kept), min(num_slots, max(len(streamed), 1)), quantise, train)
        inside = {id(member.tensor) for layout in self.layouts for member in layout.members}
        self.outside = [_size(tensor) for _, tensor in named_tensors(subject.model) if id(tensor) not in inside]
        """Bytes of the tensors that stay on the device, resident blocks included."""
        largest = max((layout.num_bytes for layout in self.layouts), default=0)
        arriving = max((self.stored_bytes(layout) for layout in self.layouts), default=0)
        self.slots = [arriving] * self.ring.num_slots + ([largest] if quantise else [])
        """Bytes of what blocks arrive in, and of what they are unpacked into."""

    @property
    def num_streamed_weights(self) -> int:
        """Numbers in the blocks that visit the device."""
        return sum(member.shape.numel() for layout in self.layouts for member in layout.members)

    @property
    def moved_bytes(self) -> int:
        """What passes over the bus when all blocks are used once."""
        return sum(map(self.stored_bytes, self.layouts))

    @property
    def unpacked_bytes(self) -> int:
        """What the card reads and writes when all blocks are unpacked once."""
        return sum(self._packed_bytes(layout) + 2 * self._num_packed(layout) for layout in self.layouts)

    @property
    def device_bytes(self) -> int:
        return sum(self.outside) + sum(self.slots)

    def stored_bytes(self, layout: BlockLayout) -> int:
        """Return what a block takes where it lives."""
        return self._packed_bytes(layout) + layout.num_bytes - 2 * self._num_packed(layout)

    def _packed_bytes(self, layout: BlockLayout) -> int:
        """Return what those values of a block take that are packed, with their factors."""
        count = self._num_packed(layout)
        return align(count) + align(2 * (count // QuantisedStore.GROUP))

    def _num_packed(self, layout: BlockLayout) -> int:
        if not self._quantise:
            return 0
        return sum(member.shape.numel() for member in layout.members if QuantisedStore.is_packed(member))


def _move(subject: Subject, device: torch.device) -> None:
    """Give every tensor its values on a device, one at a time; on the CPU, mapped from the user's files where they allow."""
    maps: dict[str, Tensor] = {}
    to_read: dict[str, Tensor] = {}
    for name, tensor in named_tensors(subject.model):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)
            continue
        entry = subject.locate(name) if subject.locate is not None and device.type == "cpu" else None
        value = _mapped(entry, maps) if entry is not None else None
        if value is None:
            to_read[name] = tensor
        else:
            bind(tensor, value)
    read = subject.read
    if to_read and device.type == "cpu" and ranks_here() > 1 and not any(each.requires_grad for each in to_read.values()):
        assert read is not None
        read = share(subject.key, {name: (each.shape, each.dtype) for name, each in to_read.items()}, read).__getitem__
    for name, tensor in to_read.items():
        assert read is not None
        bind(tensor, read(name).to(device))


def _mapped(entry: Entry, maps: dict[str, Tensor]) -> Tensor | None:
    """Return a tensor that is a piece of its file; None where it does not lie at a multiple of its dtype's size."""
    if entry.offset % entry.dtype.itemsize or not entry.num_bytes:
        return None
    file = str(entry.file)
    if file not in maps:
        size = entry.file.stat().st_size
        # Private: what is read is shared with every process that maps the file, what would be written is not.
        maps[file] = torch.from_file(file, shared=False, size=size, dtype=torch.uint8)
    return maps[file][entry.offset : entry.offset + entry.num_bytes].view(entry.dtype).view(entry.shape)


def _main_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that most of the weights are in."""
    totals: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        totals[parameter.dtype] = totals.get(parameter.dtype, 0) + parameter.nbytes
    return max(totals, key=lambda dtype: totals[dtype])


def _total(tensors: Sequence[tuple[str, Tensor]]) -> int:
    return sum(_size(tensor) for _, tensor in tensors)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
