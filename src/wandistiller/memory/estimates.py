"""What a job will take, by phase, role and kind, and how long a step of it lasts; said before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from wandistiller.memory.hardware import Hardware
from wandistiller.units import Bytes

MIB = 2**20
Where = Literal["device", "host", "page-locked", "disk"]
_ON_HOST: tuple[Where, ...] = ("host", "page-locked")


@dataclass(frozen=True)
class Item:
    """Bytes of one role and kind in one place, for one process."""

    role: str
    kind: str
    where: Where
    size: Bytes
    """The most that there is of it."""
    at_peak: Bytes | None = None
    """On the device: what there is of it at the worst moment, when another kind may have taken its place; None for all."""
    is_shared: bool = False
    """Whether the processes of a machine have it once for all of them."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One part of a job: what it takes at most, and the time of its step."""

    name: str
    items: tuple[Item, ...] = ()
    peak: Bytes = field(default_factory=lambda: Bytes(0))
    """In use on the device at the worst moment."""
    passing: Bytes = field(default_factory=lambda: Bytes(0))
    """In use on the device at the worst moment of forward and backward, updates apart."""
    reserved: Bytes = field(default_factory=lambda: Bytes(0))
    """Held of the device by PyTorch."""
    seconds: float = 0.0
    """Of one step."""
    exchange: float = 0.0
    """Of one step: time in which ranks send each other weights and gradients, beside the computation."""
    waits: float = 0.0
    """Of one step: what it would be shorter if that took no time."""
    num_steps: int = 0
    """Steps that a job takes of it; 0 for what is done once for each sample, before or after them."""
    work: Any = None
    """What is done, for whoever wants to try it."""
    is_least: bool = False
    """Whether it takes more than that, and so much that nobody has worked out how much."""

    def total(self, where: Where, ranks: int = 1) -> Bytes:
        """What is in a place, of one process, or of all processes of a machine."""
        return sum(
            (Bytes(item.size * (1 if item.is_shared else ranks)) for item in self.items if item.where == where), Bytes(0)
        )

    @property
    def on_host(self) -> Bytes:
        """Host memory of one process, page-locked included."""
        return sum((self.total(where) for where in _ON_HOST), Bytes(0))

    def beside(self, role: str) -> Bytes:
        """What is held of the device beside a role's weights."""
        weights = sum(item.size for item in self.items if (item.role, item.kind, item.where) == (role, "weights", "device"))
        return Bytes(self.reserved - weights)


@dataclass(frozen=True)
class Samples:
    """What a step of one process is about: the largest pictures or clips that there will be."""

    frames: int
    height: int
    width: int
    batch_size: int = 1
    num_batches: int = 1
    """Of a step."""

    def __str__(self) -> str:
        kind = "picture" if self.frames == 1 else "clip"
        length = "" if self.frames == 1 else f" and {self.frames} frames"
        batches = f"{self.num_batches} batches of " if self.num_batches > 1 else ""
        return f"{batches}{self.batch_size} {kind}{'s' if self.batch_size > 1 else ''} of {self.width}x{self.height}{length}"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A whole job."""

    phases: tuple[Phase, ...]
    samples: Samples | None = None
    disk: tuple[Item, ...] = ()
    """Caches, states and results."""
    ranks: int = 1
    """Processes that each machine has of it."""
    is_once: bool = False
    """Whether it is done once from beginning to end, so that all of its time counts, and not that of a step."""

    @property
    def device(self) -> Bytes:
        return max((phase.reserved for phase in self.phases), default=Bytes(0))

    @property
    def in_use(self) -> Bytes:
        """What tensors have of the device at the worst moment: with less than that nothing can run."""
        return max((phase.peak for phase in self.phases), default=Bytes(0))

    @property
    def host(self) -> Bytes:
        """Host memory of a machine, page-locked included, and with what its processes take for themselves."""
        most = max((sum(phase.total(where, self.ranks) for where in _ON_HOST) for phase in self.phases), default=0)
        return Bytes(most + self.ranks * PROCESS)

    @property
    def page_locked(self) -> Bytes:
        return max((phase.total("page-locked", self.ranks) for phase in self.phases), default=Bytes(0))

    @property
    def step_seconds(self) -> float:
        """Of the steps that the job is about: where there are several kinds, of those that take the longest together."""
        return max(self.phases, key=lambda phase: phase.seconds * phase.num_steps).seconds if self.phases else 0.0

    @property
    def seconds(self) -> float:
        """What ways to do the job are compared by."""
        return sum(phase.seconds * max(phase.num_steps, 1) for phase in self.phases) if self.is_once else self.step_seconds

    @property
    def waits(self) -> bool:
        """Whether ranks are held up by what they send each other."""
        return any(phase.waits > _HARDLY * phase.seconds for phase in self.phases)

    @property
    def memory(self) -> Bytes:
        """What all processes of a machine without a card have of its memory."""
        return Bytes(self.host + self.ranks * self.device)

    def kept_on_host(self) -> int:
        """Return what is kept for backward in the host memory of a machine."""
        kept = (item for phase in self.phases for item in phase.items if item.kind == "kept activations")
        return self.ranks * max((item.size for item in kept if item.where == "page-locked"), default=0)

    def lacks(self, hardware: Hardware) -> list[str]:
        """Say what is not enough, with the margin that a prediction needs; nothing if all fits."""
        found = []
        if hardware.card is not None and not fits(self.device, hardware.room):
            largest = max(self.phases, key=lambda phase: phase.reserved)
            needed = f"{'more than ' if largest.is_least else ''}{self.device}{self._during(largest)}"
            lack = f"needs {needed} and a margin of {margin(self.device)} on a card that has {hardware.room}"
            if fits(self.in_use, hardware.room):
                lack += f"; {self.in_use} are in use at the worst moment, so it may run if PyTorch gives back the rest in time"
            found.append(lack)
        on_host = self.host if hardware.card is not None else self.memory
        if not fits_host(on_host, hardware):
            largest = max(self.phases, key=lambda phase: phase.on_host + (0 if hardware.card is not None else phase.reserved))
            may_be_used = Bytes(int(HOST_SHARE * hardware.host_memory))
            found.append(f"needs {on_host} of host memory{self._during(largest)}, {may_be_used} may be used")
        return found

    def too_large(self, hardware: Hardware) -> set[str]:
        """Return the names of the phases that do not fit."""
        return {each.name for each in self.phases if replace(self, phases=(each,)).lacks(hardware)}

    def _during(self, phase: Phase) -> str:
        return f" for {phase.name}" if len(self.phases) > 1 else ""


PROCESS = 500 * MIB
"""What a process takes of the host before it has a tensor: Python, PyTorch, diffusers, and this program."""
_MARGIN, _LEAST_MARGIN = 0.03, 300 * MIB
_HARDLY = 0.01
"""Share of a step that counts as nothing."""
HOST_SHARE = 0.9
"""Of the host's memory, what a job may have: the system and the file cache need some."""


def fits_host(size: int, hardware: Hardware) -> bool:
    """Say whether a prediction of host memory fits."""
    return size <= HOST_SHARE * hardware.host_memory


def margin(size: int) -> Bytes:
    """Return what a prediction of device memory may be off by."""
    return Bytes(max(round(_MARGIN * size), _LEAST_MARGIN))


def fits(size: int, room: int) -> bool:
    """Say whether a prediction of device memory fits, with what it may be off by."""
    return size + margin(size) <= room


def most_that_fits(room: int) -> Bytes:
    """Return the largest prediction that fits."""
    return Bytes(max(int(min(room - _LEAST_MARGIN, room / (1 + _MARGIN))), 0))


def by_kind(items: Sequence[Item]) -> dict[tuple[str, str, Where], Item]:
    """Add up items that are alike."""
    found: dict[tuple[str, str, Where], Item] = {}
    for item in items:
        key = (item.role, item.kind, item.where)
        now = item.size if item.at_peak is None else item.at_peak
        if key in found:
            now, item = Bytes(now + (found[key].at_peak or 0)), replace(item, size=Bytes(item.size + found[key].size))
        found[key] = replace(item, at_peak=now)
    return found
