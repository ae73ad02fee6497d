"""What a job will take, by phase, role and kind, and how long a step of it lasts; said before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from wandistiller.memory.hardware import Hardware
from wandistiller.units import Bytes

MIB = 2**20
Where = Literal["device", "host", "page-locked", "disk"]


@dataclass(frozen=True)
class Item:
    """Bytes of one role and kind in one place."""

    role: str
    kind: str
    where: Where
    size: Bytes


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One part of a job: what it takes at most, and the time of its step."""

    name: str
    items: tuple[Item, ...] = ()
    peak: Bytes = field(default_factory=lambda: Bytes(0))
    """In use on the device at the worst moment."""
    reserved: Bytes = field(default_factory=lambda: Bytes(0))
    """Held of the device by PyTorch."""
    seconds: float = 0.0
    """Of one step."""
    num_steps: int = 1
    work: Any = None
    """What is done, for whoever wants to try it."""

    def total(self, where: Where) -> Bytes:
        return sum((item.size for item in self.items if item.where == where), Bytes(0))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A whole job."""

    phases: tuple[Phase, ...]
    disk: tuple[Item, ...] = ()
    """Caches, states and results."""

    @property
    def device(self) -> Bytes:
        return max((phase.reserved for phase in self.phases), default=Bytes(0))

    @property
    def host(self) -> Bytes:
        """Host memory, page-locked included."""
        return max((Bytes(phase.total("host") + phase.total("page-locked")) for phase in self.phases), default=Bytes(0))

    @property
    def page_locked(self) -> Bytes:
        return max((phase.total("page-locked") for phase in self.phases), default=Bytes(0))

    @property
    def step_seconds(self) -> float:
        """Of the phase that the job is about, which is the longest."""
        return max(self.phases, key=lambda phase: phase.seconds * phase.num_steps).seconds if self.phases else 0.0

    def lacks(self, hardware: Hardware) -> list[str]:
        """Say what is not enough, with the margin that a prediction needs; nothing if all fits."""
        found = []
        on_card = Bytes(self.device + margin(self.device))
        if hardware.card is not None and on_card > hardware.room:
            found.append(f"needs {self.device} and a margin of {margin(self.device)} on a card that has {hardware.room}")
        on_host = self.host if hardware.card is not None else Bytes(self.host + self.device)
        if on_host > HOST_SHARE * hardware.host_memory:
            found.append(f"needs {on_host} of host memory, {Bytes(int(HOST_SHARE * hardware.host_memory))} may be used")
        return found


HOST_SHARE = 0.9
"""Of the host's memory, what a job may have: the system and the file cache need some."""


def margin(size: int) -> Bytes:
    """Return what a prediction of device memory may be off by."""
    return Bytes(max(round(0.03 * size), 300 * MIB))


def by_kind(items: Sequence[Item]) -> dict[tuple[str, str, Where], Bytes]:
    """Add up items that are alike."""
    found: dict[tuple[str, str, Where], Bytes] = {}
    for item in items:
        key = (item.role, item.kind, item.where)
        found[key] = Bytes(found.get(key, 0) + item.size)
    return found
