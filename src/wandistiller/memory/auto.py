"""``auto``: the fastest placement that fits into what is free now, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from wandistiller.errors import UsageError
from wandistiller.memory.estimates import HOST_SHARE, most_that_fits
from wandistiller.memory.host_limits import available_host_memory
from wandistiller.memory.layout import lay_out, named_tensors
from wandistiller.memory.monitor import device_memory
from wandistiller.memory.placement import Footprint, Placed, Placement, Subject, find_placement, register_placement
from wandistiller.memory.shared_host import ranks_here
from wandistiller.units import Bytes


@dataclass(frozen=True)
class Choice:
    """A placement, and what was thought of it and of those before it."""

    name: str
    placement: Placement
    footprint: Footprint
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.reasons)}"


@register_placement("auto")
@dataclass(frozen=True, kw_only=True)
class Auto(Placement):
    """On the device if there is room; else streamed from host memory with as many resident blocks as fit; else from disk."""

    headroom: Bytes | None = None
    """Bytes that will be on the device beside the weights, as they are predicted: activations, other roles. With them a
    prediction's margin is left free; None where nothing is known of them."""

    def predict(self, subject: Subject, device: torch.device) -> Footprint:
        return self.choose(subject, device).footprint

    def attach(self, subject: Subject, device: torch.device) -> Placed:
        choice = self.choose(subject, device)
        placed = choice.placement.attach(subject, device)
        placed.note, placed.name = str(choice), choice.name
        return placed

    def choose(self, subject: Subject, device: torch.device) -> Choice:
        """Return the first that fits, fastest first; raise ``UsageError`` with all reasons if none does."""
        return choose(subject, device, self._room(device), Bytes(int(available_host_memory() * HOST_SHARE)), ranks_here())

    def _room(self, device: torch.device) -> Bytes:
        """Return what weights may take: they, what is beside them and a margin have to fit."""
        free = device_memory(device).free
        if self.headroom is None:
            return free
        return Bytes(max(most_that_fits(free) - self.headroom, 0))


def choose(subject: Subject, device: torch.device, room: Bytes, host: Bytes, ranks: int) -> Choice:
    """Return the first placement that fits into room on the device and the host, which so many ranks share."""
    reasons: list[str] = []
    for name, placement in _candidates(subject, device, room):
        footprint = placement.predict(subject, device)
        # Each rank takes as much; of what they share a footprint has a rank's part.
        on_host = Bytes(ranks * (footprint.host + footprint.page_locked))
        if footprint.device > room:
            reasons.append(f"{name} needs {footprint.device} of {room} on {device}")
        elif on_host > host:
            reasons.append(f"{name} needs {on_host} of {host} in host memory")
        else:
            reasons.append(f"{name} takes {footprint.device} of {room} on {device} and {on_host} of {host} on the host")
            return Choice(name, placement, footprint, tuple(reasons))
    raise UsageError(
        "This model fits nowhere on this machine.",
        why="; ".join(reasons) + ".",
        fix="Free some memory, take a smaller model or a smaller precision, or stream it from its files.",
    )


def _candidates(subject: Subject, device: torch.device, room: Bytes) -> Iterator[tuple[str, Placement]]:
    yield "gpu", find_placement("gpu")
    yield "offload", find_placement("offload", resident=_residents(subject, device, room))
    if subject.locate is not None:
        yield "disk", find_placement("disk")
    yield "cpu", find_placement("cpu")


def _residents(subject: Subject, device: torch.device, room: Bytes) -> int:
    """Return how many blocks can stay on the device beside the ring."""
    ring = find_placement("offload").predict(subject, device).device
    block = max((lay_out(named_tensors(block)).num_bytes for block in subject.blocks), default=1)
    return max(0, min((room - ring) // block, len(subject.blocks) - 2))
