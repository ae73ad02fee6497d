"""Work that can be foreseen: a transformer that is trained, or called again and again; what it takes, and how long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from wandistiller.memory.durations import Seconds, step_seconds, streamed
from wandistiller.memory.estimates import Item, Phase
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.stage import Placing, Stage
from wandistiller.memory.uses import Use
from wandistiller.units import Bytes

_HOST_TRAFFIC = 34
"""Bytes a weight that an update in host memory reads and writes."""
_UPDATE_TRAFFIC = 28
"""The same on the device: weight, gradient and two moments, read or written, in float32."""


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
    rate = hardware.bus_rate if placing.name == "offload" else min(hardware.disk_rate, hardware.bus_rate)
    return streamed(seconds, placing.plan(use).moved_bytes, rate)


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
    parallel: str = "ddp"
    """How several ranks train it: each with all of it (ddp), or with a slice (fsdp; hsdp within a group)."""
    shard_size: int | None = None
    """Ranks in a group of hsdp; None for those of a machine."""

    def phase(self, hardware: Hardware, *, name: str = "training", num_steps: int = 1) -> Phase:
        """Return what it takes."""
        least = least_kept(self.student)
        if hardware.card is not None and least > 2 * hardware.card.memory:  # hopeless, and long to work out
            kept = Item(self.student.name, "kept activations", "device", least)
            return Phase(name=name, items=(kept,), peak=least, reserved=least, seconds=float("inf"), num_steps=num_steps)
        stage = Stage(name, hardware)
        slices = self.slices(hardware)
        # A slice's rank has a block's gradients whole until they are added up and cut, like one that sends them to the host.
        student = self.student.changed(is_streamed=self.placing.is_streamed or slices > 1)
        if slices > 1:
            stage.place_slices(student, slices)
        else:
            stage.place(student, self.placing)
        if self.teacher is not None:
            stage.place(self.teacher, self.teacher_placing)
        scene, stepped = stage.scene, self._stepped
        scene.hold(student.name, "optimiser", _cut(self.optimiser.masters(stepped), slices))
        if self.averages:
            scene.hold(student.name, "average", _cut([4 * each.numel() for each in student.trained], slices))
        if hardware.num_ranks > 1:
            gradients = [each.nbytes for each in stepped]
            # DDP collects gradients in buckets beside them; slices of them stay for the optimiser.
            scene.hold(student.name, "exchanged gradients", _cut(gradients, slices))
        scene.hold("", "batch", _batch_bytes(student))
        if student.to_host:
            stage.add(student.name, "kept activations", "page-locked", _sent_bytes(student))
        for step in range(2):
            if self.teacher is not None and self.teacher_placing.name != "cpu":
                for _ in range(self.teacher_passes):
                    scene.drop(stage.play(self.teacher))
            played = stage.play(student)
            scratch = [*self.optimiser.gradients(stepped), *self.optimiser.scratch(stepped)]
            scene.hold(student.name, "step", _cut(scratch, slices))
            scene.drop(played)
            if step == 0:
                scene.hold(student.name, "optimiser", _cut(self.optimiser.state(stepped), slices))
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
            time += count * _UPDATE_TRAFFIC / hardware.card.bandwidth / self.slices(hardware)
        time = max(time, self.exchange_seconds(hardware))
        if self.teacher is not None:
            time += self.teacher_passes * self.accumulation * forward_seconds(self.teacher, self.teacher_placing, hardware)
        return time

    def slices(self, hardware: Hardware) -> int:
        """Return in how many pieces the ranks keep the student."""
        return {"fsdp": hardware.num_ranks, "hsdp": self.shard_size or max(hardware.num_cards, 1)}.get(self.parallel, 1)

    def exchange_seconds(self, hardware: Hardware) -> float:
        """Return the time of a step that ranks spend on weights and gradients, beside the computation.

        A ring passes each byte once round: gradients are added up and handed out again; slices of weights are gathered for
        forward and for backward, and gradients added up.
        """
        ranks = hardware.num_ranks
        if ranks == 1:
            return 0.0
        width = 2 if self.student.precision != "no" else self.student.dtype.itemsize
        weights = sum(each.numel() for each in self.student.model.parameters()) * width
        link = hardware.card.link_rate if hardware.card is not None else 1e10
        gradients = sum(each.nbytes for each in self.student.trained)
        between = hardware.network_rate if hardware.num_nodes > 1 else link
        if self.parallel == "hsdp":
            size = self.slices(hardware)
            copies = ranks / size
            inside = (2 * weights * self.accumulation + gradients) * (size - 1) / size / link
            return inside + 2 * gradients / size * (copies - 1) / copies / between
        passed = 2 * weights * self.accumulation + gradients if self.parallel == "fsdp" else 2 * gradients
        return passed * (ranks - 1) / ranks / between

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

    def phase(self, hardware: Hardware, *, name: str = "denoising", num_steps: int = 1) -> Phase:
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


def _cut(sizes: list[int], slices: int) -> list[int]:
    """Return each tensor's slice."""
    return [-(-size // slices) for size in sizes]


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
