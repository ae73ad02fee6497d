"""The ring: a model whose blocks live elsewhere and visit the device when their turn comes.

A ring of slots on the device, allocated once, receives the blocks ahead of their use. Block and slot belong together for good:
the n-th streamed block always computes on slot ``n % num_slots``, and only the bytes in it change. So the parameters keep their
addresses, which is what lets autograd save views of them, lets compiled code run without new guards, and lets the device hold
exactly ``num_slots`` blocks however deep the model is.

Order is kept by tickets (see ``lanes``); the host never waits. A copy into a slot may start when all computation issued before
the current block is done, and that is enough: by then everything that used the block before it has been issued, forward and
(autograd runs in the reverse order of the forward) backward. Blocks that stay on the device have no slot, but when one of them
computes the slot of the block before it is free, so copies go on meanwhile.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.errors import UsageError
from wandistiller.memory.attached import attach_mark, remove_mark
from wandistiller.memory.block_store import BlockStore, HostStore
from wandistiller.memory.gradients import HostGradients
from wandistiller.memory.inspection import CalledWith, direction, version_of
from wandistiller.memory.lanes import Lane, Ticket
from wandistiller.memory.layout import BlockLayout, Member, bind, named_tensors
from wandistiller.memory.optimiser_steps import end_failed_step, forget
from wandistiller.memory.residents import blocks_to_keep, spread_evenly
from wandistiller.memory.stored_state import keep_state_readable


@dataclass(eq=False)
class Slot:
    """A place on the device that blocks visit in turn."""

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
        self.residents: list[tuple[nn.Module, int]] = []
        """Blocks that stay on the device from the beginning, each with how many in ``blocks`` come before it."""
        self.layouts: list[BlockLayout] = []
        self.store: BlockStore
        self.slots: list[Slot] = []
        self.unpacked: Tensor | None = None
        """Where blocks compute, one after the other, if they arrive packed."""
        self._unpacked_holds: int | None = None
        self.gradients: HostGradients | None = None
        self._hooks: list[Any] = []
        self.outside: list[tuple[Tensor, torch.device]] = []
        self._ring: list[int] = []
        """Positions of the blocks that pass through the slots, in their order: all, until some are kept."""
        self._places: dict[int, int] = {}
        """Where in the ring a position is."""
        self._addresses: dict[int, tuple[Tensor, int]] = {}
        """A parameter of each block in the ring, and where it has to be."""
        self._changing: set[int] = set()
        """Buffers that forward was seen to change; they stay on the device since."""
        self._kept: dict[int, Tensor] = {}
        """Blocks that stay since the bus was found too slow, by position."""
        self.is_timed = False
        """Whether passes are timed, for ``keep_up``."""
        self._clocks: dict[int, tuple[Ticket, Ticket]] = {}
        """When each block's computation began and ended in the last forward pass."""
        self.stepping: torch.optim.Optimizer | None = None
        """The one in whose step the weights are on the host."""
        self._is_closed = False

    @property
    def device_bytes(self) -> int:
        """What the model takes on the device: the ring, what stays there, and staging."""
        ring = sum(slot.landing.numel() for slot in self.slots) + (0 if self.unpacked is None else self.unpacked.numel())
        kept = sum(flat.numel() for flat in self._kept.values())
        return ring + kept + sum(tensor.nbytes for tensor, _ in self.outside)

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
            self.make_places([position for position in self._ring if position not in self._kept])
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

    def make_places(self, ring: list[int]) -> None:
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

    def _slot(self, position: int) -> Slot:
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
        homes = {id(tensor): home for tensor, home in self.outside}
        for _, tensor in named_tensors(self.model):  # adapters may have come since, which are on the device
            tensor.data = tensor.data.to(homes.get(id(tensor), "cpu"))
        self.close()

    def close(self) -> None:
        """Let go of memory, threads and files; the model has no weights to compute with afterwards."""
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        forget(self)
        for part in (part for block in self.blocks for part in block.modules()):
            remove_mark(part, "stream")
        if self.gradients is not None:
            self.gradients.close()
        self.store.close()
        self.slots.clear()
        self._kept.clear()
        self.unpacked = None
        self.outside.clear()

    def use(self, position: int, step: int) -> None:
        """Make a streamed block's weights be there for the computation that follows, and start on the next ones.

        ``step`` is 1 in forward and -1 in backward. Where forward ends without a backward to come, the first block is next.
        """
        if position in self._kept:
            self.pass_by(position, step)
            return
        if self.stepping is not None:
            end_failed_step(self)
        if position in self._addresses and self._addresses[position][0].data_ptr() != self._addresses[position][1]:
            raise UsageError(
                "The weights of a streamed model were moved or converted.",
                why="what is stored would no longer reach them.",
                fix="Detach it, move or convert it, and stream it again.",
            )
        place = self._places[position]
        # Taken before anything of this block is issued: what the next blocks overwrite has been used by then.
        used = self.lane.mark()
        slot = self._bring(position, used)
        upcoming = self._upcoming(range(place + step, place + step * self.num_slots, step), step)
        self._expect(upcoming, place + step * self.num_slots, step)
        self.lane.wait(slot.ready)
        if self.unpacked is not None and self._unpacked_holds != position:
            with torch.no_grad():
                self.store.unpack(position, slot.landing, self.unpacked)
            self._unpacked_holds = position
            slot.emptied = self.lane.mark()
        self._bring_all(upcoming, used, {id(slot)})

    def pass_by(self, position: int, step: int) -> None:
        """Start on the next blocks while one computes that stays on the device.

        ``position`` is where it would be among those that do not: so many of them come before it.
        """
        if self._is_closed or not self._ring or self.stepping is not None:
            return
        place = bisect_left(self._ring, position) - (1 if step < 0 else 0)
        upcoming = self._upcoming(range(place, place + step * self.num_slots, step), step)
        self._expect(upcoming, place + step * self.num_slots, step)
        self._bring_all(upcoming, self.lane.mark(), set())

    def _upcoming(self, places: Iterable[int], step: int) -> list[int]:
        """Return the blocks at these places in the ring, as far as the pass goes; after a forward alone comes another one."""
        count, goes_on = len(self._ring), step > 0 and not torch.is_grad_enabled()
        return [self._ring[place % count] for place in places if 0 <= place < count or goes_on]

    def _expect(self, upcoming: list[int], place: int, step: int) -> None:
        """Name the next blocks, and two that come after them at a place in the ring, to a store that reads ahead."""
        further = (self._ring[(place + step * ahead) % len(self._ring)] for ahead in range(2))
        self.store.expect([each for each in (*upcoming, *further) if self._slot(each).holds != each])

    def _bring_all(self, upcoming: list[int], used: Ticket, taken: set[int]) -> None:
        """Bring blocks into their slots, but for those that are ``taken`` by one that is needed sooner."""
        for position in upcoming:
            slot = self._slot(position)
            if id(slot) not in taken:
                self._bring(position, used)
                taken.add(id(slot))

    def _bring(self, position: int, used: Ticket) -> Slot:
        slot = self._slot(position)
        if slot.holds != position:
            source = self.store.fetch(position)
            target = slot.landing[: source.numel()]
            after = used if self.unpacked is None else slot.emptied
            slot.ready = self.lane.start(lambda: target.copy_(source, non_blocking=True), after)
            slot.holds = position
            self.store.fetched(position, slot.ready)
        return slot

    def hook_in(self) -> None:
        """Be called wherever blocks compute, gradients are complete, or somebody reads the model's state."""
        if self.gradients is not None:
            self._hooks += self.gradients.hooks
        for position, block in enumerate(self.blocks):
            self._hook(position, block)
        for block, position in self.residents:
            self._hook_resident(position, block)
        self._keep_state_readable()

    def _hook(self, position: int, block: nn.Module) -> None:
        members = self._members(position)
        buffers = {each.name: each.tensor for each in members if not isinstance(each.tensor, nn.Parameter)}
        versions: dict[str, int] = {}
        called_with = CalledWith()

        @torch.compiler.disable
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.use(position, direction())
            versions.update({name: version_of(buffer) for name, buffer in buffers.items()})
            called_with.note((args, kwargs))
            if self.is_timed and direction() > 0:
                self._clocks[position] = (self.lane.clock(), None)

        @torch.compiler.disable
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self.is_timed and self._clocks.get(position, (0, 0))[1] is None:
                self._clocks[position] = (self._clocks[position][0], self.lane.clock())
            for name in [name for name, buffer in buffers.items() if version_of(buffer) != versions[name]]:
                self._let_stay(buffers.pop(name))
            # Of several results backward may begin with any, and some may be used by nobody. What is handed through as it
            # came is another block's result: when its gradient is there, that block is next.
            for tensor in called_with.results(output):
                tensor.register_hook(go_back)

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

    def _hook_resident(self, position: int, block: nn.Module) -> None:
        called_with = CalledWith()

        @torch.compiler.disable
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.pass_by(position, direction())
            called_with.note((args, kwargs))

        @torch.compiler.disable
        def after(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in called_with.results(output):
                tensor.register_hook(lambda gradient: self.pass_by(position, -1))

        self._hooks.append(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._hooks.append(block.register_forward_hook(after))

    def _let_stay(self, buffer: Tensor) -> None:
        """Let a buffer that forward changes be lost no more with its slot."""
        buffer.data = buffer.data.clone()
        self._changing.add(id(buffer))
        self.outside.append((buffer, torch.device("cpu")))

    def has_any(self, parameters: set[int]) -> bool:
        """Say whether one of these parameters, by their identities, is streamed."""
        return any(id(member.tensor) in parameters for layout in self.layouts for member in layout.members)

    def move_to_host(self) -> None:
        """Let parameters and gradients be in host memory, for an optimiser's step."""
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

    def move_to_slots(self) -> None:
        """Let parameters be on the device again, without gradients."""
        self.stepping = None
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
