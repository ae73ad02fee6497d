"""Work beside the computation, ordered by tickets instead of by waiting.

A lane starts a piece of work (a copy, a dequantisation) that may run at any time after one ticket, and hands out another for
when it is done; the computation waits for that one without stopping the host. ``CudaLane`` does this with a stream and events.
``ImmediateLane`` is for devices that share the host's memory, where work is done when the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Ticket = Any
"""Something that has happened or will: opaque outside of the lane that gave it out."""


class Lane(Protocol):
    """What streaming needs from a device."""

    def start(self, work: Callable[[], object], after: Ticket) -> Ticket:
        """Start work once ``after`` has happened; the ticket says when it is done."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Let the computation from here on wait for a ticket."""
        ...

    def mark(self) -> Ticket:
        """Return a ticket for all computation issued so far."""
        ...

    def wait_on_host(self, ticket: Ticket) -> None:
        """Stop the calling thread until a ticket has happened; for threads beside the one that computes."""
        ...

    def clock(self) -> Ticket:
        """Return a ticket for all computation issued so far that remembers when that was done."""
        ...

    def seconds_between(self, start: Ticket, end: Ticket) -> float:
        """Return the time between two clock tickets, waiting for the later one."""
        ...

    def guard(self, tensor: Tensor) -> None:
        """Let a tensor's memory be given to no one else while work on it is under way, also if nobody holds it any more."""
        ...


class ImmediateLane:
    """Work done on the spot."""

    def start(self, work: Callable[[], object], after: Ticket) -> Ticket:
        work()

    def wait(self, ticket: Ticket) -> None:
        pass

    def mark(self) -> Ticket:
        return None

    def wait_on_host(self, ticket: Ticket) -> None:
        pass

    def clock(self) -> Ticket:
        return time.perf_counter()

    def seconds_between(self, start: Ticket, end: Ticket) -> float:
        return float(end - start)

    def guard(self, tensor: Tensor) -> None:
        pass


class CudaLane:
    """Work on a stream of its own; tickets are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, work: Callable[[], object], after: Ticket) -> Ticket:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            work()
            return self._stream.record_event()

    def wait(self, ticket: Ticket) -> None:
        if ticket is not None:
            torch.cuda.current_stream(self._device).wait_event(ticket)

    def mark(self) -> Ticket:
        return torch.cuda.current_stream(self._device).record_event()

    def wait_on_host(self, ticket: Ticket) -> None:
        if ticket is not None:
            ticket.synchronize()

    def clock(self) -> Ticket:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: Ticket, end: Ticket) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def guard(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)


def lane_for(device: torch.device) -> Lane:
    """Return a new lane that fits a device."""
    return CudaLane(device) if device.type == "cuda" else ImmediateLane()
