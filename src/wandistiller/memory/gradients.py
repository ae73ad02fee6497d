"""Gradients of streamed blocks, handed to the host as soon as each is complete.

A gradient is copied into page-locked memory beside the computation, and a thread passes it on when it has arrived: to an
optimiser that works there, or by default into a sum that a training step reads at its end. The memory is two blocks' that are
used in turn, or, for a taker that wants gradients to stay, a place for each block.

On the device a block's gradients are there until the next block's are complete: the host, which is ahead of the device, waits
then until they have left, so that there are never more than two blocks' however far ahead it could be.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wandistiller.memory.host import HostBudget, allocate_host
from wandistiller.memory.lanes import Lane, Ticket, lane_for
from wandistiller.memory.layout import BlockLayout

GradientTaker = Callable[[Tensor, Tensor], None]
"""Told a parameter and its gradient in host memory, on a thread of its own; the memory is used again afterwards, or by the
block's next gradients where they stay."""


class _Landing:
    """Memory that the gradients of one block after the other arrive in."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.is_free = threading.Event()
        self.is_free.set()


@dataclass
class _Leaving:
    """Gradients of one block on the device, on their way to the host."""

    position: int
    gradients: list[Tensor] = field(default_factory=list)
    ticket: Ticket = None
    """When the last of them has left."""


class HostGradients:
    """Takes the gradients of streamed parameters off the device."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        device: torch.device,
        take: GradientTaker | None = None,
        *,
        budget: HostBudget | None = None,
        lane: Lane | None = None,
    ) -> None:
        self._sums: dict[int, Tensor] = {}
        self.hooks: list[Any] = []
        self.take = take or self._add
        self.see: GradientTaker | None = None
        """Told a parameter and its gradient while that is on the device, before it leaves."""
        self.stay = False
        """Whether gradients of the next backward stay where they arrive."""
        self._device, self._budget = device, budget
        self._lane = lane or lane_for(device)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._idle = threading.Condition()
        self._pending = 0
        trained = [[member for member in layout.members if member.tensor.requires_grad] for layout in layouts]
        self._sizes = [layout.num_bytes for layout in layouts]
        self._places: dict[int, Tensor] = {}
        """By block, where gradients stay; made when the first come."""
        self._in_turn: list[_Landing] = []
        """Two: one being filled while the other is passed on; made when the first come."""
        self._current: tuple[int, _Landing] | None = None
        """Block whose gradients are leaving now, and where to."""
        self._members = {id(member.tensor): (position, member) for position, each in enumerate(trained) for member in each}
        leave = functools.partial(_leave, weakref.ref(self))  # autograd, which holds it, is not seen by Python's collector
        self.hooks += [member.tensor.register_post_accumulate_grad_hook(leave) for _, member in self._members.values()]
        self._counts = [len(members) for members in trained]
        self._leaving = _Leaving(-1)
        self._before = _Leaving(-1)
        self._seen: set[int] = set()
        """Of the block whose gradients are leaving now, the parameters that have had theirs."""
        # The thread holds neither this nor the model, so that both can be dropped without a word.
        weakref.finalize(self, self._queue.put, None)
        arguments = (weakref.ref(self), self._queue)
        self._thread = threading.Thread(target=_pass_on, args=arguments, name="wandistiller-gradients", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when every gradient so far has been passed on; raise what the taker raised."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0 or self._error is not None)
            if self._pending == 0:
                self._leaving, self._before = _Leaving(-1), _Leaving(-1)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient in host memory, summed over backward passes; not where another taker was given."""
        self.wait()
        return self._sums.get(id(parameter))

    def clear(self) -> None:
        """Forget the sums, for the next step."""
        self.wait()
        self._sums.clear()

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()

    def leave(self, parameter: Tensor) -> None:
        """Start a gradient's way to the host; called by autograd when it is complete."""
        position, member = self._members[id(parameter)]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self.see is not None:
            self.see(parameter, gradient)
        target = member.view(self._place(position) if self.stay else self._landing(position, parameter).memory)
        ticket = self._lane.start(lambda: target.copy_(gradient, non_blocking=True), self._lane.mark())
        with self._idle:
            self._pending += 1
        self._queue.put((ticket, parameter, target))
        self._hold(position, gradient, ticket)
        if self._current is not None and len(self._seen) == self._counts[position]:
            self._end_block()

    def _hold(self, position: int, gradient: Tensor, ticket: Ticket) -> None:
        """Keep a gradient's memory on the device for as long as it is needed."""
        if position != self._leaving.position:
            self._pass_block(position)  # some parameters of the last block have had no gradient
        self._leaving.gradients.append(gradient)
        self._leaving.ticket = ticket
        if len(self._leaving.gradients) == self._counts[position]:
            self._pass_block(-1)

    def _pass_block(self, position: int) -> None:
        """Let go of the gradients of the block before the last, once they have left; those of the next one follow."""
        if self._leaving.gradients:
            self._lane.wait_on_host(self._before.ticket)
            self._before = self._leaving
        self._leaving = _Leaving(position)

    def _place(self, position: int) -> Tensor:
        """Return where a block's gradients stay."""
        if position not in self._places:
            self._places[position] = allocate_host(self._sizes[position], self._device, self._budget)
        return self._places[position]

    def _landing(self, position: int, parameter: Tensor) -> _Landing:
        """Return the landing place for a block, the other one than the last block's, once it is free."""
        if not self._in_turn:
            self._in_turn = [_Landing(allocate_host(max(self._sizes), self._device, self._budget)) for _ in range(2)]
        if self._current is not None and (self._current[0] != position or id(parameter) in self._seen):
            self._end_block()  # where some parameters have had no gradient, or a backward broke off
        if self._current is None:
            self._in_turn.reverse()
            chosen = self._in_turn[0]
            chosen.is_free.wait()
            chosen.is_free.clear()
            self._current = (position, chosen)
        self._seen.add(id(parameter))
        return self._current[1]

    def _end_block(self) -> None:
        """Let the next but one block's gradients arrive where this one's have, once those are passed on."""
        assert self._current is not None
        self._queue.put(self._current[1])
        self._current = None
        self._seen.clear()

    def _arrived(self, ticket: Ticket, parameter: Tensor, gradient: Tensor) -> None:
        self._lane.wait_on_host(ticket)
        try:
            self.take(parameter, gradient)
        except BaseException as error:  # noqa: BLE001 - raised again where the training loop waits
            self._error = error
        with self._idle:
            self._pending -= 1
            self._idle.notify_all()

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        if id(parameter) in self._sums:
            self._sums[id(parameter)].add_(gradient)
        else:
            self._sums[id(parameter)] = gradient.clone()


def _leave(owner: weakref.ref[HostGradients], parameter: Tensor) -> None:
    gradients = owner()
    if gradients is not None:
        gradients.leave(parameter)


def _pass_on(owner: weakref.ref[HostGradients], arriving: queue.SimpleQueue[Any]) -> None:
    while (item := arriving.get()) is not None:
        if isinstance(item, _Landing):
            item.is_free.set()
        elif (gradients := owner()) is not None:
            gradients._arrived(*item)
            del gradients
        del item
