"""Block streaming: a model whose blocks live elsewhere and visit the device when their turn comes.

A ring of slots on the device, allocated once, receives the blocks ahead of their use. Block and slot belong together for good:
the n-th streamed block always computes on slot ``n % num_slots``, and only the bytes in it change. So the parameters keep their
addresses, which is what lets autograd save views of them, lets compiled code run without new guards, and lets the device hold
exactly ``num_slots`` blocks however deep the model is.

Order is kept by tickets (see ``lanes``); the host never waits. A copy into a slot may start when all computation issued before
the current block is done, and that is enough: by then everything that used the block before it has been issued, forward and
(autograd runs in the reverse order of the forward) backward.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from wandistiller.errors import UsageError
from wandistiller.memory.attached import attach_mark, remove_mark
from wandistiller.memory.block_store import BlockStore, HostStore, QuantisedStore
from wandistiller.memory.disk_store import DiskStore
from wandistiller.memory.gradients import GradientTaker, HostGradients
from wandistiller.memory.host import HostBudget
from wandistiller.memory.inspection import tensors_in, version_of
from wandistiller.memory.lanes import Lane, Ticket, lane_for
from wandistiller.memory.layout import BlockLayout, Member, lay_out, named_tensors, travelling
from wandistiller.memory.stored_state import keep_state_readable
from wandistiller.models.weight_files import Entry

ReadTensor = Callable[[str], Tensor]
"""Gives a tensor of the model by its full name, in host memory."""


@dataclass(eq=False)
class _Slot:
    landing: Tensor
    """Where a block's bytes arrive: what it computes on, or what is unpacked into that."""
    holds: int | None = None
    """Which streamed block's bytes are here or on their way."""
    ready: Ticket = None
    emptied: Ticket = None
    """When what arrived here last has been unpacked; for blocks that arrive packed."""


class BlockStream:
    """The streamed blocks of one model; ``detach`` undoes everything."""

    def __init__(self, model: nn.Module, device: torch.device, lane: Lane, num_slots: int) -> None:
        self.model = model
        self.device = device
        self.lane = lane
        self.num_slots = num_slots
        self.blocks: list[nn.Module] = []
        self.layouts: list[BlockLayout] = []
        self.store: BlockStore
        self.slots: list[_Slot] = []
        self.unpacked: Tensor | None = None
        """Where blocks compute, one after the other, if they arrive packed."""
        self._unpacked_holds: int | None = None
        self.gradients: HostGradients | None = None
        self._hooks: list[Any] = []
        self._outside: list[tuple[Tensor, torch.device]] = []
        self._ring: list[int] = []
        """Positions of the blocks that pass through the slots, in their order: all, until some are kept."""
        self._places: dict[int, int] = {}
        """Where in the ring a position is."""
        self._addresses: dict[int, tuple[Tensor, int]] = {}
        """A parameter of each block in the ring, and where it has to be."""
        self._changing: set[int] = set()
        """Buffers that forward was seen to change; they stay on the device since."""
        self._kept: dict[int, Tensor] = {}
        """Blocks that stay on the device since the bus was found too slow, by position."""
        self.is_timed = False
        """Whether passes are timed, for ``keep_up``."""
        self._clocks: dict[int, tuple[Ticket, Ticket]] = {}
        """When each block's computation began and ended in the last forward pass."""
        self._stepping: torch.optim.Optimizer | None = None
        """The one in whose step the weights are on the host."""
        self._is_closed = False

    @property
    def device_bytes(self) -> int:
        """What the model takes on the device: the ring, what stays there, and staging."""
        ring = sum(slot.landing.numel() for slot in self.slots) + (0 if self.unpacked is None else self.unpacked.numel())
        kept = sum(flat.numel() for flat in self._kept.values())
        return ring + kept + sum(tensor.nbytes for tensor, _ in self._outside)

    @torch.inference_mode(False)
    def keep_up(self, room: int) -> int:
        """Let so many blocks stay on the device that the bus keeps up with the rest, as far as ``room`` bytes go.

        Call it between steps, after a pass with ``is_timed`` set, which it ends. Returns how many blocks were added; weights
        that are trained or stored in 8 bits go on as they are.
        """
        self.is_timed = False
        clocks, self._clocks = self._clocks, {}
        is_trained = any(member.tensor.requires_grad for layout in self.layouts for member in layout.members)
        has_timed = len(clocks) == len(self.blocks) and all(end is not None for _, end in clocks.values())
        if is_trained or self.unpacked is not None or not has_timed or not self._ring:
            return 0
        compute = sum(self.lane.seconds_between(start, end) for start, end in clocks.values()) / len(self.blocks)
        largest = max(self._ring, key=lambda position: self.layouts[position].num_bytes)
        copy, size = self._copy_seconds(largest), self.layouts[largest].num_bytes
        wanted = blocks_to_keep(len(self.blocks), copy, compute, room + len(self._kept) * size, size)
        added = min(wanted - len(self._kept), len(self._ring) - self.num_slots)
        if added > 0:
            for index in spread_evenly(len(self._ring), added):
                self._keep(self._ring[index])
            self._make_places([position for position in self._ring if position not in self._kept])
        return max(added, 0)

    def _copy_seconds(self, position: int) -> float:
        """Time a block's way into its slot."""
        self.invalidate()
        start = self.lane.clock()
        self.lane.wait(self._bring(position, self.lane.mark()).ready)
        seconds = self.lane.seconds_between(start, self.lane.clock())
        self.invalidate()
        return seconds

    def _keep(self, position: int) -> None:
        values = self._values(position)
        flat = torch.empty(self.layouts[position].num_bytes, dtype=torch.uint8, device=self.device)
        for member in self._members(position):
            member.view(flat).copy_(values[member.name])
            member.tensor.data = member.view(flat)
        self._kept[position] = flat
        self.store.drop(position)

    def _make_places(self, ring: list[int]) -> None:
        """Let these blocks pass through the slots in turn."""
        self._ring, self._places = ring, {position: place for place, position in enumerate(ring)}
        self._addresses.clear()
        self.invalidate()
        for position in ring:
            landing = self._slot(position).landing if self.unpacked is None else self.unpacked
            for member in self._members(position):
                bind(member.tensor, member.view(landing))
                if isinstance(member.tensor, nn.Parameter):
                    self._addresses[position] = (member.tensor, member.tensor.data_ptr())

    def _members(self, position: int) -> list[Member]:
        """Return those tensors of a block that are in its slot when it computes."""
        return [member for member in self.layouts[position].members if id(member.tensor) not in self._changing]

    def _slot(self, position: int) -> _Slot:
        return self.slots[self._places[position] % self.num_slots]

    def _values(self, position: int) -> dict[str, Tensor]:
        """Return a block's weights where they are now, which is not in a slot."""
        if position in self._kept:
            return {member.name: member.view(self._kept[position]) for member in self.layouts[position].members}
        return self.store.views(position)

    def invalidate(self) -> None:
        """Forget what the slots hold, because the stored weights have changed (an optimiser's step, a load)."""
        self._unpacked_holds = None
        for slot in self.slots:
            slot.holds = None

    @torch.inference_mode(False)
    def detach(self) -> None:
        """Give the model its weights back in ordinary host memory, and take off every hook; once."""
        if self._is_closed:
            return
        for index in range(len(self.layouts)):
            values = self._values(index)
            for member in self._members(index):
                member.tensor.data = values[member.name].to("cpu", copy=True)
            del values
            self.store.drop(index)  # so that host memory never holds the model twice
        homes = {id(tensor): home for tensor, home in self._outside}
        for _, tensor in named_tensors(self.model):  # adapters may have come since, which are on the device
            tensor.data = tensor.data.to(homes.get(id(tensor), "cpu"))
        self.close()

    def close(self) -> None:
        """Let go of memory, threads and files; the model has no weights to compute with afterwards."""
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _streams.discard(self)
        for part in (part for block in self.blocks for part in block.modules()):
            remove_mark(part, "stream")
        if self.gradients is not None:
            self.gradients.close()
        self.store.close()
        self.slots.clear()
        self._kept.clear()
        self.unpacked = None
        self._outside.clear()

    def use(self, position: int, step: int) -> None:
        """Make a streamed block's weights be there for the computation that follows, and start on the next ones.

        ``step`` is 1 in forward and -1 in backward. Where forward ends without a backward to come, the first block is next.
        """
        if position in self._kept:
            return
        if self._stepping is not None:
            self._end_failed_step()
        if position in self._addresses and self._addresses[position][0].data_ptr() != self._addresses[position][1]:
            raise UsageError(
                "The weights of a streamed model were moved or converted.",
                why="what is stored would no longer reach them.",
                fix="Detach it, move or convert it, and stream it again.",
            )
        count, upcoming, place = len(self._ring), [], self._places[position]
        for ahead in range(1, self.num_slots):
            following = place + step * ahead
            if 0 <= following < count or (step > 0 and not torch.is_grad_enabled()):
                upcoming.append(self._ring[following % count])
        # Taken before anything of this block is issued: what the next blocks overwrite has been used by then.
        used = self.lane.mark()
        slot = self._bring(position, used)
        self.store.expect([*upcoming, *self._further(position, step)])
        self.lane.wait(slot.ready)
        if self.unpacked is not None and self._unpacked_holds != position:
            with torch.no_grad():
                self.store.unpack(position, slot.landing, self.unpacked)
            self._unpacked_holds = position
            slot.emptied = self.lane.mark()
        for following in upcoming:
            if self._slot(following) is not slot:
                self._bring(following, used)

    def _further(self, position: int, step: int) -> list[int]:
        """Return the blocks beyond the ring, for a store that reads ahead."""
        reach = range(self.num_slots, self.num_slots + 2)
        return [self._ring[(self._places[position] + step * ahead) % len(self._ring)] for ahead in reach]

    def _bring(self, position: int, used: Ticket) -> _Slot:
        slot = self._slot(position)
        if slot.holds != position:
            source = self.store.fetch(position)
            target = slot.landing[: source.numel()]
            after = used if self.unpacked is None else slot.emptied
            slot.ready = self.lane.start(lambda: target.copy_(source, non_blocking=True), after)
            slot.holds = position
            self.store.fetched(position, slot.ready)
        return slot

    def _hook_in(self) -> None:
        """Be called wherever blocks compute, gradients are complete, or somebody reads the model's state."""
        if self.gradients is not None:
            self._hooks += self.gradients.hooks
        for position, block in enumerate(self.blocks):
            self._hook(position, block)
        self._keep_state_readable()

    def _hook(self, position: int, block: nn.Module) -> None:
        members = self._members(position)
        buffers = {each.name: each.tensor for each in members if not isinstance(each.tensor, nn.Parameter)}
        versions: dict[str, int] = {}
        given: dict[int, Any] = {}
        """What made each tensor that the block was called with, by the tensor's identity."""

        @torch.compiler.disable
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            # A forward inside of a backward is a recomputation, and the block before is next.
            is_backward = torch._C._current_graph_task_id() != -1
            self.use(position, -1 if is_backward else 1)
            versions.update({name: version_of(buffer) for name, buffer in buffers.items()})
            given.clear()
            if torch.is_grad_enabled():
                given.update({id(tensor): tensor.grad_fn for tensor in tensors_in((args, kwargs)) if tensor.requires_grad})
            if self.is_timed and not is_backward:
                self._clocks[position] = (self.lane.clock(), None)

        @torch.compiler.disable
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self.is_timed and self._clocks.get(position, (0, 0))[1] is None:
                self._clocks[position] = (self._clocks[position][0], self.lane.clock())
            for name in [name for name, buffer in buffers.items() if version_of(buffer) != versions[name]]:
                self._let_stay(buffers.pop(name))
            # Of several results backward may begin with any, and some may be used by nobody. What is handed through as it
            # came is another block's result: when its gradient is there, that block is next.
            for tensor in tensors_in(output):
                if tensor.requires_grad and given.get(id(tensor), _nobody) is not tensor.grad_fn:
                    tensor.register_hook(go_back)
            given.clear()

        def go_back(gradient: Tensor) -> None:
            if torch.is_grad_enabled():
                raise UsageError(
                    "A streamed model has no second derivatives.",
                    why="going through its gradients again would find other blocks' weights in the slots.",
                    fix="Go backward without create_graph, or keep the model on the device.",
                )
            self.use(position, -1)

        for part in block.modules():
            attach_mark(part, "stream", "streamed blocks")
        # Before all others, which may compute with the weights already.
        self._hooks.append(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._hooks.append(block.register_forward_hook(after))

    def _let_stay(self, buffer: Tensor) -> None:
        """Let a buffer that forward changes be lost no more with its slot."""
        buffer.data = buffer.data.clone()
        self._changing.add(id(buffer))
        self._outside.append((buffer, torch.device("cpu")))

    def _is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(member.tensor) in parameters for layout in self.layouts for member in layout.members)

    def _end_failed_step(self) -> None:
        """Bring the weights back onto the device that a step which raised has left on the host."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name in ("step", "wrapper") and frame.f_locals.get("self") is self._stepping:
                raise UsageError(
                    "An optimiser's step asks a streamed model for its loss.",
                    why="its weights are in host memory until the step is done.",
                    fix="Compute the loss before the step, or keep the model on the device.",
                )
            frame = frame.f_back
        self._move_to_slots()

    def _move_to_host(self) -> None:
        if not isinstance(self.store, HostStore):
            if any(member.tensor.grad is not None for layout in self.layouts for member in layout.members):
                raise UsageError(
                    "Weights in 8 bits or on disk cannot be trained.", fix="Stream them from host memory as they are."
                )
            return
        for position in self._ring:
            values = self.store.views(position)
            for member in self._members(position):
                tensor = member.tensor
                gradient = tensor.grad
                if self.gradients is not None and gradient is None:
                    gradient = self.gradients.of(tensor)
                tensor.grad = None
                tensor.data = values[member.name]
                if gradient is not None:
                    tensor.grad = gradient.to(tensor.device)

    def _move_to_slots(self) -> None:
        self._stepping = None
        if not isinstance(self.store, HostStore):
            return
        for position in self._ring:
            landing = self._slot(position).landing
            for member in self._members(position):
                member.tensor.grad = None
                member.tensor.data = member.view(landing)
        if self.gradients is not None:
            self.gradients.clear()
        self.invalidate()

    def _keep_state_readable(self) -> None:
        """Let ``state_dict`` and ``load_state_dict`` see the stored weights instead of what happens to be in the slots."""

        def stored(position: int) -> dict[int, Tensor]:
            values = self._values(position)
            return {id(member.tensor): values[member.name] for member in self._members(position)}

        def ids(position: int) -> set[int]:
            return {id(member.tensor) for member in self._members(position)}

        changed = self.invalidate if isinstance(self.store, HostStore) else None
        for position, block in enumerate(self.blocks):
            members = functools.partial(ids, position)
            self._hooks += keep_state_readable(block, functools.partial(stored, position), changed, members)


class _Handover:
    """Weights on their way from a model in memory to a store, which never has more than a block of them twice."""

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        self._layouts = layouts
        self._num_released = 0

    def take(self, index: int, member: Member) -> Tensor:
        """Return a member's values; the blocks before its own have arrived, and the model lets go of them."""
        for done in range(self._num_released, index):
            for each in self._layouts[done].members:
                each.tensor.data = torch.empty(0, dtype=each.dtype)
        self._num_released = index
        return member.tensor.data

    def give_back(self, index: int, values: dict[str, Tensor]) -> None:
        """Let the model have a block again, as one after it has found no room."""
        for member in self._layouts[index].members:
            member.tensor.data = values[member.name]


@torch.inference_mode(False)
def stream_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device | str,
    *,
    num_slots: int = 2,
    resident: int = 0,
    read: ReadTensor | None = None,
    locate: Callable[[str], Entry | None] | None = None,
    quantise: bool = False,
    budget: HostBudget | None = None,
    shared_as: str | None = None,
    train: bool = False,
    on_gradient: GradientTaker | None = None,
    lane: Lane | None = None,
) -> BlockStream:
    """Stream the blocks of a model in host memory, or on the meta device with ``read`` to give its tensors by name.

    ``resident`` of the blocks, spread evenly, stay on the device, and so do the trained adapters of frozen blocks. With
    ``train`` whole blocks are trained: their gradients leave for the host as soon as they are complete, into ``gradients`` or
    to ``on_gradient``; what an optimiser's ``zero_grad`` would drop, ``gradients.clear()`` drops. With ``locate``, which says
    where a tensor lies in the user's files as it is used, blocks are read from there when they are needed, and ``read`` is
    asked for those tensors only that have to be converted. ``shared_as`` is a name under which the ranks of a machine have
    frozen blocks in common.
    """
    if num_slots < 1 or resident < 0:
        raise UsageError(f"{num_slots} slots and {resident} resident blocks are not possible.", fix="Take a slot or more.")
    device = torch.device(device)
    names = {id(tensor): name for name, tensor in reversed(named_tensors(model))}
    streamed = [block for index, block in enumerate(blocks) if index not in spread_evenly(len(blocks), resident)]
    stream = BlockStream(model, device, lane or lane_for(device), min(num_slots, max(len(streamed), 1)))
    stream.blocks = streamed
    taken: set[int] = set()
    for tensors in travelling(model, streamed, train=train):
        taken |= {id(tensor) for _, tensor in tensors}
        layout = lay_out(tensors)
        if quantise:  # what is packed comes first
            is_packed = {member.name: QuantisedStore.is_packed(member) for member in layout.members}
            layout = lay_out(sorted(tensors, key=lambda item: (not is_packed[item[0]], str(item[1].dtype))))
        stream.layouts.append(layout)

    # Remembered by the members' own identity, which stays when a tensor on the meta device becomes a real one.
    full_names = {id(member): names[id(member.tensor)] for layout in stream.layouts for member in layout.members}

    def member_name(member: Member) -> str:
        return full_names[id(member)]

    handover = _Handover(stream.layouts)

    def read_member(index: int, member: Member) -> Tensor:
        return handover.take(index, member) if read is None else read(member_name(member))

    if locate is not None:
        if train or read is None:
            raise UsageError("Blocks on disk are read, not trained.", fix="Keep trained weights in host memory.")
        find = lambda index, member: locate(member_name(member))  # noqa: E731
        stream.store = DiskStore(stream.layouts, read_member, device, find, lane=lane)
    else:
        make = QuantisedStore if quantise else HostStore
        give_back = handover.give_back if read is None else None
        stream.store = make(stream.layouts, read_member, device, budget, shared_as, give_back)
    try:
        _make_ring(stream)
        _keep_the_rest_on_device(stream, taken, names, read)
        _let_optimisers_step(stream)
        if train:
            stream.gradients = HostGradients(stream.layouts, device, on_gradient, budget=budget)
        stream._hook_in()
    except BaseException:  # the device has no room; a model that was in memory is there again
        if read is None:
            stream.detach()
        stream.close()
        raise
    return stream


_nobody = object()
_streams: weakref.WeakSet[BlockStream] = weakref.WeakSet()
"""Those whose weights an optimiser may change."""


def _let_optimisers_step(stream: BlockStream) -> None:
    """Let PyTorch's optimisers update stored weights: during a step, parameters and gradients are on the host.

    PyTorch's hooks are one pair for the process and stay: taking one off when a model is collected could happen in the middle
    of an optimiser's walk through them.
    """
    _streams.add(stream)
    _install_hooks()


@functools.cache
def _install_hooks() -> None:
    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for stream in list(_streams):
            if stream._is_stepped_by(optimizer):
                stream._move_to_host()
                stream._stepping = optimizer

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for stream in list(_streams):
            if stream._is_stepped_by(optimizer):
                stream._move_to_slots()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def spread_evenly(total: int, chosen: int) -> set[int]:
    """Choose indices so that the gaps between them differ by at most one."""
    chosen = min(chosen, total)
    return {(2 * index + 1) * total // (2 * chosen) for index in range(chosen)}


def blocks_to_keep(num_blocks: int, copy_seconds: float, compute_seconds: float, room: int, block_bytes: int) -> int:
    """Return how many blocks to keep resident so that the bus just keeps up, as far as there is room for them."""
    if copy_seconds <= 0:
        return 0
    # The copies of all streamed blocks have to fit into the computation of all blocks.
    streamable = int(num_blocks * compute_seconds / copy_seconds)
    return max(0, min(num_blocks - streamable, room // max(block_bytes, 1)))


def _make_ring(stream: BlockStream) -> None:
    largest = max((layout.num_bytes for layout in stream.layouts), default=0)
    for _ in range(stream.num_slots):
        landing = torch.empty(stream.store.staging_bytes or largest, dtype=torch.uint8, device=stream.device)
        # A model is often dropped with the next pass's first block on its way here.
        stream.lane.guard(landing)
        stream.slots.append(_Slot(landing))
    if stream.store.staging_bytes:
        stream.unpacked = torch.empty(largest, dtype=torch.uint8, device=stream.device)
    stream._make_places(list(range(len(stream.blocks))))


def _keep_the_rest_on_device(stream: BlockStream, taken: set[int], names: dict[int, str], read: ReadTensor | None) -> None:
    for name, tensor in named_tensors(stream.model):
        if id(tensor) in taken:
            continue
        home = torch.device("cpu") if tensor.is_meta else tensor.device
        value = read(name) if tensor.is_meta and read is not None else tensor.data
        bind(tensor, value.to(stream.device))
        stream._outside.append((tensor, home))


def bind(tensor: Tensor, value: Tensor) -> None:
    """Let a tensor that modules hold have other values; one on the meta device changes its kind, not its identity."""
    if not tensor.is_meta:
        tensor.data = value
    else:
        # Made empty and given its values afterwards, so that it does not share the slot's count of changes: autograd would
        # take each block that arrives for a change of all the others.
        other = torch.empty(0, dtype=value.dtype, device=value.device)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, requires_grad=tensor.requires_grad)
        other.data = value
        torch.utils.swap_tensors(tensor, other)
