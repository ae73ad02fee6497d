"""What a job will take, by phase, role and kind, and how long a step of it lasts; said before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from wandistiller.memory.durations import Seconds, step_seconds, streamed
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.placement import Footprint, StreamPlan, Subject
from wandistiller.memory.scene import Played, Scene
from wandistiller.memory.subjects import choose_placement
from wandistiller.memory.tape import Tape
from wandistiller.memory.uses import Use
from wandistiller.units import Bytes

MIB = 2**20
Where = Literal["device", "host", "page-locked", "disk"]
_CUDA = torch.device("cuda")
_HOST_STATE = 12
"""Bytes a weight that an optimiser in host memory keeps: a float32 copy and two moments."""
_HOST_TRAFFIC = 34
"""Bytes a weight that its update reads and writes."""
_UPDATE_TRAFFIC = 28
"""The same on the device: weight, gradient and two moments, read or written, in float32."""


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


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Where a role's weights live."""

    name: str = "gpu"
    resident: int = 0
    eight_bit: bool = False

    @property
    def is_streamed(self) -> bool:
        return self.name in ("offload", "disk")


class Stage:
    """A phase being worked out."""

    def __init__(self, name: str, hardware: Hardware) -> None:
        self.name = name
        self.scene = Scene()
        self._hardware = hardware
        self._items: list[Item] = []
        self._played: list[tuple[str, Played]] = []
        card = hardware.card
        self.scene.hold("", "libraries", [card.workspace] if card is not None else [])

    def place(self, use: Use, placing: Placing) -> None:
        """Put a transformer's weights where they belong."""
        subject = Subject(model=use.model, blocks=list(use.model.get_submodule("blocks").children()))
        tensors = [*use.model.parameters(), *use.model.buffers()]
        if placing.name == "cpu":
            self.add(use.name, "weights", "host", sum(tensor.nbytes for tensor in tensors))
            return
        if not placing.is_streamed:
            self.scene.hold(use.name, "weights", [tensor.nbytes for tensor in tensors])
            return
        plan = StreamPlan(subject, 2, placing.resident, placing.eight_bit, train=use.trains == "everything")
        self.scene.hold(use.name, "slots", plan.slots)
        self.scene.hold(use.name, "weights", plan.outside)
        trains = use.trains == "everything"
        options = {"resident": placing.resident, "eight_bit": placing.eight_bit, "train": trains}
        footprint: Footprint = choose_placement(placing.name, **options).predict(subject, _CUDA)  # type: ignore[arg-type]
        self.add(use.name, "weights", "page-locked", footprint.page_locked)
        self.add(use.name, "weights", "host", footprint.host)
        if trains:
            largest = max(use.block_bytes)
            self.add(use.name, "gradients", "page-locked", 2 * largest)
            count = sum(each.numel() for each in use.model.get_submodule("blocks").parameters())
            self.add(use.name, "optimiser", "host", count * _HOST_STATE)
            self.add(use.name, "gradients", "host", sum(use.block_bytes))

    def add(self, role: str, kind: str, where: Where, size: int) -> None:
        """Count something that is not on the device."""
        if size:
            self._items.append(Item(role, kind, where, Bytes(size)))

    def play(self, use: Use) -> Played:
        """Take a step."""
        return self.play_tape(use.name, use.placed_tape, use.repeats)

    def play_tape(self, role: str, tape: Tape, repeats: Mapping[str, int] = MappingProxyType({})) -> Played:
        """Take a step that is on tape."""
        played = self.scene.play(tape, repeats)
        self._played.append((role, played))
        return played

    def finished(self, seconds: float, num_steps: int = 1) -> Phase:
        """Return the phase."""
        items = list(self._items)
        items += [Item(role, kind, "device", size) for (role, kind), size in self.scene.held.items() if size]
        held = sum(self.scene.held.values())
        peak = max((played.peak for _, played in self._played), default=Bytes(held))
        for role, played in self._played[-1:]:
            # At the worst moment, what was kept may have been used up and gradients be there instead.
            items.append(Item(role, "gradients", "device", Bytes(sum(played.left.values()))))
            items.append(Item(role, "kept activations", "device", played.kept))
        return Phase(
            name=self.name,
            items=tuple(item for item in items if item.size),
            peak=peak,
            reserved=self.scene.reserved,
            seconds=seconds,
            num_steps=num_steps,
        )


def forward_seconds(use: Use, placing: Placing, hardware: Hardware) -> float:
    """Return the time of one pass of a frozen transformer."""
    seconds = step_seconds(use.tape, use.repeats, hardware, is_compiled=use.is_compiled)
    return placed_seconds(seconds, use, placing, hardware)


def placed_seconds(seconds: Seconds, use: Use, placing: Placing, hardware: Hardware) -> float:
    """Return the time of a step with the weights where they live."""
    if placing.name == "cpu" and hardware.card is not None:
        return step_seconds(use.tape, use.repeats, replace(hardware, card=None)).total
    if not placing.is_streamed:
        return seconds.total
    blocks = use.block_bytes
    moved = sum(blocks) * (1 - placing.resident / len(blocks)) * (0.508 if placing.eight_bit else 1.0)
    rate = hardware.bus_rate if placing.name == "offload" else min(hardware.disk_rate, hardware.bus_rate)
    return streamed(seconds, int(moved), rate)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A student that is trained, perhaps while a teacher is asked about each batch."""

    student: Use
    placing: Placing = field(default_factory=Placing)
    optimiser: OptimiserChoice = field(default_factory=OptimiserChoice)
    averages: bool = False
    accumulation: int = 1
    teacher: Use | None = None
    teacher_placing: Placing = field(default_factory=Placing)
    teacher_passes: int = 1

    def phase(self, hardware: Hardware, *, name: str = "training", num_steps: int = 1) -> Phase:
        """Return what it takes."""
        least = least_kept(self.student)
        if hardware.card is not None and least > 2 * hardware.card.memory:  # hopeless, and long to work out
            kept = Item(self.student.name, "kept activations", "device", least)
            return Phase(name=name, items=(kept,), peak=least, reserved=least, seconds=float("inf"), num_steps=num_steps)
        stage = Stage(name, hardware)
        student = self.student.changed(is_streamed=self.placing.is_streamed)
        stage.place(student, self.placing)
        if self.teacher is not None:
            stage.place(self.teacher, self.teacher_placing)
        scene, stepped = stage.scene, self._stepped
        scene.hold(student.name, "optimiser", self.optimiser.masters(stepped))
        if self.averages:
            scene.hold(student.name, "average", [4 * each.numel() for each in student.trained])
        scene.hold("", "batch", _batch_bytes(student))
        if student.to_host:
            stage.add(student.name, "kept activations", "page-locked", _sent_bytes(student))
        for step in range(2):
            if self.teacher is not None and self.teacher_placing.name != "cpu":
                for _ in range(self.teacher_passes):
                    scene.drop(stage.play(self.teacher))
            played = stage.play(student)
            scene.hold(student.name, "step", [*self.optimiser.gradients(stepped), *self.optimiser.scratch(stepped)])
            scene.drop(played)
            if step == 0:
                scene.hold(student.name, "optimiser", self.optimiser.state(stepped))
            scene.let_go(student.name, "step")
        return replace(stage.finished(self.seconds(hardware), num_steps), work=self)

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of a step."""
        student = self.student
        seconds = step_seconds(student.tape, student.repeats, hardware, is_compiled=student.is_compiled)
        time = placed_seconds(seconds, student, self.placing, hardware) * self.accumulation
        count = sum(each.numel() for each in student.trained)
        if self.is_on_host:
            time = max(time, count * _HOST_TRAFFIC / hardware.host_rate)
        elif hardware.card is not None:
            time += count * _UPDATE_TRAFFIC / hardware.card.bandwidth
        if self.teacher is not None:
            time += self.teacher_passes * self.accumulation * forward_seconds(self.teacher, self.teacher_placing, hardware)
        return time

    @property
    def is_on_host(self) -> bool:
        """Whether the blocks' optimiser is in host memory."""
        return self.placing.is_streamed and self.student.trains == "everything"

    @property
    def _stepped(self) -> list[nn.Parameter]:
        """Return what an optimiser on the device changes."""
        blocks = {id(each) for each in self.student.model.get_submodule("blocks").parameters()}
        return [each for each in self.student.trained if not (self.is_on_host and id(each) in blocks)]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """A frozen transformer that is called again and again."""

    use: Use
    placing: Placing = field(default_factory=Placing)
    passes: int = 1
    """Calls a step: two with guidance."""
    held: tuple[int, ...] = ()
    """Bytes of what is held beside it: latents, velocities."""

    def phase(self, hardware: Hardware, *, name: str, num_steps: int = 1) -> Phase:
        """Return what it takes."""
        stage = Stage(name, hardware)
        use = self.use.changed(is_streamed=self.placing.is_streamed)
        stage.place(use, self.placing)
        stage.scene.hold("", "latents", self.held)
        if self.placing.name != "cpu":
            for _ in range(2):
                stage.scene.drop(stage.play(use))
        return replace(stage.finished(self.seconds(hardware), num_steps), work=self)

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of a step."""
        return self.passes * forward_seconds(self.use, self.placing, hardware)


def least_kept(use: Use) -> Bytes:
    """Return what a step keeps at least where nothing is recomputed, compiled or not: a fact about Wan's blocks.

    Kept are the inputs and outputs of five products with matrices of the model's width, of two norms and two attentions, and
    the feed-forward's two wide ones, in 16 bits.
    """
    if use.policy != "none" or use.to_host or use.trains == "nothing":
        return Bytes(0)
    width = use.config["num_attention_heads"] * use.config["attention_head_dim"]
    a_token = 2 * (12 * width + 2 * use.config["ffn_dim"])
    return Bytes(use.batch_size * use.num_tokens * a_token * use.num_blocks)


def _batch_bytes(use: Use) -> list[int]:
    """Return what a batch takes: latents, noise, text, sigma."""
    latents = 4 * use.batch_size * torch.Size(use.latent_shape).numel()
    return [latents, latents, 4 * use.batch_size * use.text_tokens * use.config["text_dim"], 4 * use.batch_size]


def _sent_bytes(use: Use) -> int:
    """Return what is in host memory between forward and backward."""
    work = use.tape.work(use.repeats)
    return sum(kernel.num_bytes * count for kernel, count in work.items() if kernel.kind == "to_host")


def by_kind(items: Sequence[Item]) -> dict[tuple[str, str, Where], Bytes]:
    """Add up items that are alike."""
    found: dict[tuple[str, str, Where], Bytes] = {}
    for item in items:
        key = (item.role, item.kind, item.where)
        found[key] = Bytes(found.get(key, 0) + item.size)
    return found
