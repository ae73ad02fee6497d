"""Copies from host to device beside the computation, ordered by tickets instead of by waiting.

A lane starts a copy that may run at any time after one ticket, and hands out another for when it is done; the computation
waits for that one without stopping the host. ``CudaLane`` does this with a stream and events. ``ImmediateLane`` is for
devices that share the host's memory, where a copy is done when the call returns.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Ticket = Any
"""Something that has happened or will: opaque outside of the lane that gave it out."""


class Lane(Protocol):
    """What a ring of slots needs from a device."""

    def copy(self, target: Tensor, source: Tensor, after: Ticket | None) -> Ticket:
        """Start copying once ``after`` has happened; the ticket says when it is done."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Let the computation from here on wait for a ticket."""
        ...

    def mark(self) -> Ticket:
        """Return a ticket for all computation issued so far."""
        ...


class ImmediateLane:
    """Copies done on the spot."""

    def copy(self, target: Tensor, source: Tensor, after: Ticket | None) -> Ticket:
        target.copy_(source)
        return None

    def wait(self, ticket: Ticket) -> None:
        pass

    def mark(self) -> Ticket:
        return None


class CudaLane:
    """Copies on a stream of their own; tickets are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor, after: Ticket | None) -> Ticket:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, ticket: Ticket) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def mark(self) -> Ticket:
        return torch.cuda.current_stream(self._device).record_event()


def lane_for(device: torch.device) -> Lane:
    """Return the lane that fits a device."""
    return CudaLane(device) if device.type == "cuda" else ImmediateLane()
