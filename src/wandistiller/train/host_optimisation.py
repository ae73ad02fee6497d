"""An optimiser for streamed blocks: their gradients, moments and float32 weights are in host memory, and so is the update.

Gradients arrive block by block while backward goes on. Without clipping a block is updated as soon as its own are complete,
beside the backward of the blocks before it. With clipping the norm of all gradients is needed first, so the updates run beside
the next forward instead. Of the blocks that wait the one that forward needs first comes first: a block's weights leave for
the device when they are new. What is not streamed is updated on the device by an optimiser of the ordinary kind.

An update is limited by how fast memory is read and written. So gradients stay where they arrive and are measured on the device,
before they leave, and threads go through a block in pieces that stay in a cache: a gradient is made float32, used, and the new
weights rounded without either going to memory in between. Only where a step adds up several backward passes are gradients
copied on the host, into float32 sums. A moving average takes new weights in on the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.errors import UsageError
from wandistiller.memory.block_store import HostStore
from wandistiller.memory.block_stream import BlockStream
from wandistiller.memory.host import large_pages
from wandistiller.memory.host_adamw import AdamW
from wandistiller.memory.host_threads import PIECE, HostThreads, Work
from wandistiller.memory.layout import Member
from wandistiller.train.ema import MovingAverage
from wandistiller.train.optimisation import MixedPrecision, Optimisation, OptimiserOptions, refuse_other_flags
from wandistiller.train.schedules import rate_factor

_LEAST_ADDED = 2**18
"""Numbers that are worth a thread's while to add up."""
ON_HOST_FLAGS = "--optimizer adamw --placement offload"


@dataclass
class _Part:
    """Some of a member's weights, with their moments."""

    index: int
    """Of the member."""
    where: slice
    """In the member."""
    in_room: slice
    """In a thread's room for gradients in float32."""
    master: Tensor
    first_moment: Tensor
    second_moment: Tensor


@dataclass
class _Block:
    """One streamed block's trained weights as one flat float32 tensor, with AdamW's moments and the gradient."""

    members: list[Member]
    names: list[str]
    offsets: list[int]
    master: Tensor
    first_moment: Tensor
    second_moment: Tensor
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Each member's: where it arrived, or the sum of several."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Room for those sums, in float32."""
    num_steps: int = 0
    num_arrived: int = 0

    @property
    def state(self) -> dict[str, Tensor]:
        return {"master": self.master, "exp_avg": self.first_moment, "exp_avg_sq": self.second_moment}

    def sum_of(self, index: int) -> Tensor:
        """Return room for the sum of a member's gradients, with what it has or new."""
        if index not in self.sums:
            self.sums[index] = torch.empty(self.members[index].shape)
        return self.sums[index]

    def of_member(self, flat: Tensor, index: int) -> Tensor:
        """Return a member's part of a flat tensor, in the member's shape."""
        member = self.members[index]
        start = self.offsets[index]
        return flat[start : start + member.shape.numel()].view(member.shape)

    @functools.cached_property
    def pieces(self) -> list[list[_Part]]:
        """The pieces that threads take: parts of large members, several small ones together."""
        found: list[list[_Part]] = []
        room = 0
        for index, member in enumerate(self.members):
            for start in range(0, member.shape.numel(), PIECE):
                size = min(member.shape.numel() - start, PIECE)
                if size > room:
                    found.append([])
                    room = PIECE
                place = PIECE - room
                flats = (flat[self.offsets[index] + start :][:size] for flat in self.state.values())
                found[-1].append(_Part(index, slice(start, start + size), slice(place, place + size), *flats))
                room -= size
        return found


class HostOptimisation:
    """What ``Optimisation`` does, for a model whose blocks are streamed and trained."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stream: BlockStream,
        options: OptimiserOptions,
        precision: MixedPrecision,
        device: torch.device,
    ) -> None:
        if options.name != "adamw" or precision == "fp16":
            raise UsageError(
                "Offloaded weights are trained with adamw, in bf16 or float32.",
                fix="Use --optimizer adamw and --mixed-precision bf16.",
            )
        assert stream.gradients is not None and isinstance(stream.store, HostStore)
        self._store = stream.store
        self.parameters = dict(parameters)
        self.options = options
        self._stream = stream
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._blocks: list[_Block] = []
        self._places: dict[int, tuple[int, int]] = {}
        for position, layout in enumerate(stream.layouts):
            members = [member for member in layout.members if id(member.tensor) in names]
            self._blocks.append(self._make_block(position, members, [names[id(member.tensor)] for member in members]))
            self._places |= {id(member.tensor): (position, index) for index, member in enumerate(members)}
        rest = {name: parameter for name, parameter in self.parameters.items() if id(parameter) not in self._places}
        # Clipped here, together with the streamed ones.
        self._rest = Optimisation(rest, replace(options, clip_norm=None), precision, device)
        self._number = 0
        self._backwards = 0
        self._expected = 0
        self._clip: float | None = options.clip_norm
        self._threads = HostThreads()
        self._updates: dict[int, Work] = {}
        """By block: the last update, done or under way."""
        self._average: MovingAverage | None = None
        self._averaged: set[int] = set()
        """Blocks whose average has taken this step in, or is about to."""
        self._norms: list[Tensor] = []
        """Of the gradients that are complete, on the device or of sums on the host."""
        stream.gradients.see, stream.gradients.take = self._see, self._arrive

    def follow(self, average: MovingAverage) -> None:
        """Take new weights into their average, too."""
        self._average = average
        average.leave_to(self.wait)

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return self._rate_at(max(self._number - 1, 0))

    @property
    def loss_scale(self) -> float:
        return 1.0

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Add a loss's gradients to those of the step; the last ones complete it."""
        assert self._stream.gradients is not None
        self._expected = self._backwards + 1 if is_last else 0
        if self._backwards == 0:
            self._forget()
        self._stream.gradients.stay = is_last and self._backwards == 0
        loss.backward()
        self._stream.gradients.wait()
        self._backwards += 1

    def step(self, number: int) -> Tensor:
        """Finish the step with this number, counted from 0; return the norm of all gradients."""
        on_device = [parameter.grad for parameter in self._rest.parameters.values() if parameter.grad is not None]
        self._norms += [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in on_device]
        norm = float(torch.linalg.vector_norm(torch.stack(self._norms))) if self._norms else 0.0
        scale = 1.0 if self._clip is None else min(1.0, self._clip / (norm + 1e-6))
        if self._clip is not None:
            for gradient in on_device:
                gradient.mul_(scale)
        for position, block in enumerate(self._blocks):
            if block.gradients:  # with clipping all, else those with weights that have none
                self._update(position, block, scale)
        self._rest.step(number)
        if self._average is not None:
            self._take_in_the_rest(self._average)
        self._number, self._backwards = number + 1, 0
        self._stream.invalidate()
        return torch.tensor(norm)

    def wait(self) -> None:
        """Return when all updates are done; raise what one of them raised."""
        while self._updates:
            self._updates.popitem()[1].wait()

    def close(self) -> None:
        """End the threads, once all updates are done."""
        self._threads.close()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all state: tensors by name, and plain values."""
        self.wait()
        tensors, facts = self._rest.state()
        tensors = {f"rest.{name}": tensor for name, tensor in tensors.items()}
        for block in self._blocks:
            for kind, flat in block.state.items():
                tensors |= {f"{kind}.{name}": block.of_member(flat, index) for index, name in enumerate(block.names)}
        counts = [block.num_steps for block in self._blocks]
        return tensors, {"flags": ON_HOST_FLAGS, "rest": facts, "number": self._number, "num_steps": counts}

    def like(self, key: str) -> Tensor | None:
        return None

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take up a state again."""
        refuse_other_flags(facts, ON_HOST_FLAGS)
        prefix = "rest."
        rest = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        self._rest.load_state(rest, facts["rest"])
        self._number = facts["number"]
        counts = facts.get("num_steps", [self._number] * len(self._blocks))  # older states do not say
        for block, count in zip(self._blocks, counts, strict=True):
            block.num_steps = count
            for kind, flat in block.state.items():
                for index, name in enumerate(block.names):
                    block.of_member(flat, index).copy_(tensors[f"{kind}.{name}"])

    def _make_block(self, position: int, members: list[Member], names: list[str]) -> _Block:
        sizes = [member.shape.numel() for member in members]
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        values = self._store.views(position)
        flat, *moments = (large_pages(sum(sizes)) for _ in range(3))
        for member, offset, size in zip(members, offsets, sizes, strict=True):
            flat[offset : offset + size].view(member.shape).copy_(values[member.name])
        return _Block(members, names, offsets, flat, *moments)

    def _forget(self) -> None:
        """Begin a step anew, also after one that broke off."""
        self._norms.clear()
        self._averaged.clear()
        for block in self._blocks:
            block.gradients, block.num_arrived = {}, 0
        for parameter in self._rest.parameters.values():
            parameter.grad = None

    def _see(self, parameter: Tensor, gradient: Tensor) -> None:
        """Measure a gradient that leaves the device, and leave alone what an update still reads where it will arrive."""
        assert self._stream.gradients is not None
        if self._stream.gradients.stay:
            self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        if (before := self._updates.get(self._places[id(parameter)][0])) is not None:
            before.wait()

    def _arrive(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a gradient in; called on the thread that gradients arrive on."""
        position, index = self._places[id(parameter)]
        block = self._blocks[position]
        is_complete, is_first = self._expected == self._backwards + 1, self._backwards == 0
        if is_complete and is_first:
            block.gradients[index] = gradient
        else:
            total = block.sum_of(index)
            norm = self._add(total, gradient, is_new=index not in block.gradients, is_measured=is_complete)
            block.gradients[index] = total
            if norm is not None:
                self._norms.append(norm.to(self._stream.device))
        if not is_complete:
            return
        block.num_arrived += 1
        if self._clip is None and block.num_arrived == len(block.members):
            self._update(position, block, 1.0)

    def _add(self, total: Tensor, gradient: Tensor, *, is_new: bool, is_measured: bool) -> Tensor | None:
        """Add a gradient to a sum and return the sum's norm if it is wanted, before any update goes on: backward waits for the
        memory that the gradient arrived in."""
        target, arrived = total.view(-1), gradient.view(-1)
        # All threads have a part, and what a part is measured from is still in a cache.
        size = min(max(-(-target.numel() // self._threads.count), _LEAST_ADDED), PIECE)

        def add(number: int, room: Tensor) -> Tensor | None:
            piece = slice(number * size, (number + 1) * size)
            part = target[piece].copy_(arrived[piece]) if is_new else target[piece].add_(arrived[piece])
            return torch.linalg.vector_norm(part) if is_measured else None

        norms = self._threads.begin(add, -(-target.numel() // size), order=-1).wait()
        return torch.linalg.vector_norm(torch.stack([torch.zeros(()), *norms])) if is_measured else None

    def _update(self, position: int, block: _Block, scale: float) -> None:
        """Begin to give a block its new weights, in float32 and where it is streamed from; until then nobody may have it."""
        rate = self._rate_at(block.num_steps)
        block.num_steps += 1
        number = torch.tensor(float(block.num_steps))
        divisor = None if scale == 1.0 else torch.tensor(scale).reciprocal()
        adamw = AdamW(rate, self.options.betas, self.options.weight_decay, number, divisor)
        values = self._store.views_at_once(position)
        arrived, block.gradients, block.num_arrived = block.gradients, {}, 0
        average, taken = self._average, 0.0 if self._average is None else self._average.weight(self._number + 1)
        self._averaged.add(position)

        def update(index: int, room: Tensor) -> None:
            parts = [part for part in block.pieces[index] if part.index in arrived]
            gradients = [room[part.in_room] for part in parts]
            torch._foreach_copy_(gradients, [arrived[part.index].view(-1)[part.where] for part in parts])
            masters = [part.master for part in parts]
            adamw.step(masters, gradients, [part.first_moment for part in parts], [part.second_moment for part in parts])
            weights = [values[block.members[part.index].name].view(-1)[part.where] for part in parts]
            torch._foreach_copy_(weights, masters)
            if average is not None:
                self._take_in(average, block, block.pieces[index], values, room, taken)

        if (before := self._updates.get(position)) is not None:
            before.wait()  # done, or fetching the block would have waited; raises what went wrong
        self._store.hold_back(position)
        then = functools.partial(self._store.let_go, position)
        self._updates[position] = self._threads.begin(update, len(block.pieces), order=position, then=then)

    def _take_in(
        self,
        average: MovingAverage,
        block: _Block,
        parts: Sequence[_Part],
        values: Mapping[str, Tensor],
        room: Tensor,
        taken: float,
    ) -> None:
        """Take weights of a block into their average, in float32."""
        weights = [room[part.in_room] for part in parts]
        torch._foreach_copy_(weights, [values[block.members[part.index].name].view(-1)[part.where] for part in parts])
        averages = [average.averages[block.names[part.index]].view(-1)[part.where] for part in parts]
        torch._foreach_lerp_(averages, weights, taken)

    @torch.no_grad()
    def _take_in_the_rest(self, average: MovingAverage) -> None:
        """Take in what no update of a block does: weights on the device, and blocks that had no gradient in this step."""
        taken = average.weight(self._number + 1)
        for name, parameter in self._rest.parameters.items():
            average.averages[name].lerp_(parameter.to(torch.float32), taken)
        for position, block in enumerate(self._blocks):
            if position not in self._averaged:
                values, room = self._store.views(position), torch.empty(PIECE)
                for parts in block.pieces:
                    self._take_in(average, block, parts, values, room, taken)

    def _rate_at(self, number: int) -> float:
        options = self.options
        return options.rate * rate_factor(
            options.schedule, number, warmup_steps=options.warmup_steps, num_steps=options.num_steps
        )
