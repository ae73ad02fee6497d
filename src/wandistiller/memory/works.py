"""Work that can be foreseen: a transformer that is trained, or called again and again; what it takes, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from wandistiller.errors import UsageError
from wandistiller.memory.auto import choose
from wandistiller.memory.durations import Seconds, step_seconds, updated_on_host
from wandistiller.memory.encoder_phases import Decoding
from wandistiller.memory.estimates import HOST_SHARE, PROCESS, Phase, Where, most_that_fits
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.host_adamw import UPDATE_TRAFFIC
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.placed_durations import forward_seconds, gathered_seconds, placed_seconds
from wandistiller.memory.placement import Subject
from wandistiller.memory.residents import spread_evenly
from wandistiller.memory.scene import FEATURES, Made, Scene
from wandistiller.memory.stage import HOST_STATE, NOTHING, Moment, Placing, Stage, left_by
from wandistiller.memory.uses import Features, Use
from wandistiller.models.features import matched_blocks
from wandistiller.units import Bytes

_UPDATE_TRAFFIC = 28
"""Bytes a weight that an update on the device reads and writes: weight, gradient and two moments in float32."""
_SUM_TRAFFIC = 8
"""Bytes a weight of adding a gradient up on the host, beside the gradient: its sum read and written in float32."""
_CLIP_TRAFFIC = 12
"""Gradients read for their norm, then read and written."""
_MASTER_TRAFFIC = 12
"""Gradients of 16 bits made 32, and weights of 32 bits made 16."""
_AVERAGE_TRAFFIC = 12
"""Average and weight read, average written."""
_AVERAGE_ON_HOST = 8
"""The same in host memory, where new weights are still in a cache."""


def foreseen_placing(use: Use, on_device: Phase, hardware: Hardware) -> Placing:
    """Return what ``auto`` will choose for a role on a machine, from a phase as it is with all of its weights on the device."""
    if hardware.card is None:
        return Placing()
    room = Bytes(max(most_that_fits(hardware.room) - on_device.beside(use.name), 0))
    host = Bytes(max(int(hardware.host_memory * HOST_SHARE) - max(hardware.num_cards, 1) * PROCESS, 0))
    subject = Subject(model=use.model, blocks=list(use.model.get_submodule("blocks").children()), locate=lambda name: None)
    # Ranks have one copy of weights that nobody changes.
    ranks = 1 if use.trains == "nothing" else max(hardware.num_cards, 1)
    try:
        choice = choose(subject, torch.device("cuda"), room, host, ranks)
    except UsageError:
        return Placing()
    return Placing(name=choice.name, resident=getattr(choice.placement, "resident", 0))


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Pictures drawn now and then while a student is trained, one at a time, by a student that learns nothing meanwhile."""

    student: Use
    decoding: Decoding

    def play(self, stage: Stage, aside: list[int]) -> None:
        """Do it; ``aside`` are weights that are put away for their average."""
        stage.scene.hold(self.student.name, "weights put aside", aside)
        stage.scene.drop(stage.play(self.student))
        stage.scene.let_go(self.student.name, "weights put aside")
        # Another VAE than that of a loss in pixels, where there is one.
        stage.scene.hold("vae", "weights for pictures", self.decoding.weights)
        stage.scene.drop(stage.play_tape("vae", self.decoding.tape))
        stage.scene.let_go("vae", "weights for pictures")


@dataclass(frozen=True, kw_only=True)
class Training:
    """A student that is trained, perhaps while a teacher is asked about each batch."""

    student: Use
    placing: Placing = field(default_factory=Placing)
    optimiser: OptimiserChoice = field(default_factory=OptimiserChoice)
    averages: bool = False
    accumulation: int = 1
    clips: bool = True
    """Whether gradients are clipped, so that an update waits for all of them."""
    recordings: float = 0.0
    """Shapes of batches for which the step is recorded once and then replayed, each counted by its share of the largest."""
    teacher: Use | None = None
    teacher_placing: Placing = field(default_factory=Placing)
    teacher_passes: int = 1
    matches_features: bool = False
    """Whether each block of the student learns what a block of the teacher gives."""
    teacher_slices: int = 1
    """Ranks that have the teacher between them, each a slice of it."""
    teacher_rests: bool = False
    """Whether it is asked so seldom, for answers that are kept, that steps take no time for it."""
    teacher_serves: int = 1
    """Ranks that one teacher answers, one after the other."""
    drawing: Drawing | None = None
    parallel: str = "ddp"
    """How several ranks train it: each with all of it (ddp), or with a slice (fsdp; hsdp within a group)."""
    shard_size: int | None = None
    """Ranks in a group of hsdp; None for those of a machine."""

    def phase(self, hardware: Hardware, *, name: str = "training", num_steps: int = 1) -> Phase:
        """Return what it takes."""
        if self._computes_on_host(hardware):
            return self._phase_on_host(hardware, name, num_steps)
        stage = Stage(name, hardware)
        student = self._placed_student
        self._place(stage, hardware)
        least = least_kept(student)
        if hardware.card is not None and least > 2 * hardware.card.memory:  # hopeless, and long to work out
            stage.scene.hold(student.name, "optimiser", self._cut(self.optimiser.state(self.stepped), hardware))
            stage.scene.hold(student.name, "kept activations", [least])
            return replace(stage.finished(float("inf"), num_steps), is_least=True, work=self)
        trial = self._record(stage, hardware) if self.is_recorded else 0
        if trial:
            self._try_out(stage, trial)
        if student.to_host:
            stage.add(student.name, "kept activations", "page-locked", _sent_bytes(student))
        for step in range(2):
            self._play_step(stage, hardware, is_first=step == 0)
            if self.recordings > 1 and trial:
                # Any shape may be the last, beside all others and what the optimiser keeps by then.
                self._try_out(stage, trial)
        if self.drawing is not None:
            averaged = [each.nbytes for each in self.stepped] if self.averages else []
            self.drawing.play(stage, self._cut(averaged, hardware))
        seconds = self.seconds(hardware)
        exchange = self.exchange_seconds(hardware) + self._num_passes * self._teacher_exchange(hardware)
        waits = seconds - self.seconds(hardware, waits=False) if exchange else 0.0
        return replace(stage.finished(seconds, num_steps), exchange=exchange, waits=waits, work=self)

    @property
    def _placed_student(self) -> Use:
        # A slice's rank has a block's gradients whole until they are added up and cut, like one that sends them to the host.
        return self.compared.changed(is_streamed=self.placing.is_streamed or self.is_sliced)

    def _place(self, stage: Stage, hardware: Hardware) -> None:
        """Put there what stays for all steps."""
        scene, student, stepped = stage.scene, self._placed_student, self.stepped
        if self.is_sliced:
            stage.place_slices(student, self.slices(hardware))
        else:
            stage.place(student, self.placing, adds_gradients=self.accumulation > 1)
        if self.teacher is not None and self.teacher_slices > 1:
            stage.place_slices(self.teacher, self.teacher_slices)
        elif self.teacher is not None:
            stage.place(self.teacher, self.teacher_placing, is_guest=True)
        if student.pixels is not None:
            scene.hold("vae", "weights", student.pixels.weights)
        scene.hold(student.name, "optimiser", self._cut(self.optimiser.masters(stepped), hardware))
        if self.averages:  # each where its weight is
            scene.hold(student.name, "average", self._cut([4 * each.numel() for each in stepped], hardware))
            stage.add(student.name, "average", "host", 4 * self.num_on_host)
        if hardware.num_ranks > 1 or self.is_sliced:
            # DDP collects gradients in buckets beside them; slices of them stay for the optimiser.
            scene.hold(student.name, "exchanged gradients", self._cut([each.nbytes for each in stepped], hardware))
        # All batches of a step are brought before its first.
        scene.hold("", "batch", batch_bytes(student) * self.accumulation)

    def _play_step(self, stage: Stage, hardware: Hardware, *, is_first: bool) -> None:
        """Take a step: batches one after the other, then the update."""
        scene, student, stepped = stage.scene, self._placed_student, self.stepped
        computed = student.changed(comes_cast=True) if self.is_sliced and student.precision == "bf16" else student
        given = self._ask(stage, hardware)
        played = None if self.is_recorded else stage.play(computed, given=given, staying=self._resident)
        if played is not None and self.accumulation > 1:
            given = self._ask(stage, hardware, left_by(student, played))
            scene.drop(stage.play_again(computed, played, given=given))
        if played is not None and not self.is_sliced:
            played = scene.exchange(played, student.name, "update", self.optimiser.masters(stepped))
        else:
            scene.hold(student.name, "update", self._cut(self.optimiser.masters(stepped), hardware))
        if is_first:  # while its gradients are there
            scene.hold(student.name, "optimiser", self._cut(self.optimiser.state(stepped), hardware))
        scene.hold(student.name, "update", self._cut(self.optimiser.scratch(stepped), hardware))
        stage.note(student.name, played)
        if played is not None:
            scene.drop(played)
        scene.let_go(student.name, "update")

    def _cut(self, sizes: list[int], hardware: Hardware) -> list[int]:
        """Return each tensor's slice; all of it where there are none."""
        slices = self.slices(hardware)
        return [-(-size // slices) for size in sizes]

    def _ask(self, stage: Stage, hardware: Hardware, there: Moment = NOTHING) -> Sequence[Made]:
        """Ask the teacher about a batch, beside what one before it has left; return what the student is compared with."""
        given: Sequence[Made] = ()
        if self.teacher is None or self.teacher_placing.computes_on_host(self.teacher, hardware):
            return given
        keeps = matched_blocks(self.student.num_blocks, self.teacher.num_blocks) if self.matches_features else ()
        for _ in range(self.teacher_passes):
            played = stage.play(self.teacher, there, keeps=() if given else keeps)
            stage.scene.drop(played)
            if played.results:
                # Of a student that is deeper than its teacher several blocks follow the same one.
                results = dict(zip(dict.fromkeys(keeps), played.results, strict=True))
                given = [results[block] for block in keeps]
                there = {**there, (self.teacher.name, FEATURES): stage.scene.size(played.results)}
        if given and self.teacher_serves > 1:
            stage.scene.hold(self.teacher.name, "features for another rank", [stage.scene.size(dict.fromkeys(given))])
            stage.scene.drop(stage.play(self.teacher, there))
            stage.scene.let_go(self.teacher.name, "features for another rank")
        return given

    def _record(self, stage: Stage, hardware: Hardware) -> int:
        """Hold what a recorded step keeps: gradients that stay where they are, and memory of its own for all that it makes,
        libraries included.

        Return what it takes beside that for a moment: it is tried first in memory of its own, too, and the trial's gradients
        are still there while forward is recorded.
        """
        scene, student = stage.scene, self.student
        scene.hold(student.name, "added gradients", [each.nbytes for each in self.stepped])
        recording = Scene()
        recording.hold("", "libraries", [hardware.card.workspace] if hardware.card is not None else [])
        libraries = recording.allocated
        played = recording.play(student.tape, student.repeats)
        scene.hold(student.name, "recorded step", [round(recording.reserved * self.recordings)])
        return max(libraries + played.kept + sum(played.left.values()) - recording.reserved, 0)

    def _try_out(self, stage: Stage, num_bytes: int) -> None:
        """Have what a trial takes there for a moment."""
        stage.scene.hold(self.student.name, "trial of a recording", [num_bytes])
        stage.note()
        stage.scene.let_go(self.student.name, "trial of a recording")

    @property
    def is_recorded(self) -> bool:
        return self.recordings > 0

    def with_teacher(self, placing: Placing) -> Training:
        """Return the same with the teacher elsewhere."""
        assert self.teacher is not None
        return replace(self, teacher=self.teacher.changed(is_streamed=placing.is_streamed), teacher_placing=placing)

    def _computes_on_host(self, hardware: Hardware) -> bool:
        return self.placing.name == "cpu" and hardware.card is not None

    def _phase_on_host(self, hardware: Hardware, name: str, num_steps: int) -> Phase:
        """Return what it takes where the CPU computes: all that a card would hold, in host memory; batches come from there."""
        on_host = replace(self, placing=Placing()).phase(replace(hardware, card=None))
        stage = Stage(name, hardware)
        for item in on_host.items:
            where: Where = "host" if item.where == "device" else item.where
            stage.add(item.role, item.kind, where, item.size if item.at_peak is None else item.at_peak)
        stage.scene.hold("", "batch", batch_bytes(self.student) * self.accumulation)
        return replace(stage.finished(self.seconds(hardware), num_steps), work=self)

    def seconds(self, hardware: Hardware, *, waits: bool = True) -> float:
        """Return the time of a step; ``waits`` says whether for what ranks send each other, too."""
        student = self.compared
        seconds = step_seconds(
            student.tape,
            student.repeats,
            hardware,
            is_compiled=student.is_compiled,
            is_recorded=self.is_recorded,
            has_policy=student.policy != "none" or student.to_host,
        )
        placed = placed_seconds(seconds, student, self.placing, hardware)
        count = sum(each.numel() for each in student.trained)
        time = placed.total * self.accumulation
        if self.is_on_host:
            time = self._seconds_on_host(placed, hardware)
        elif self._computes_on_host(hardware):
            time += count * _UPDATE_TRAFFIC / hardware.update_rate
        elif hardware.card is not None:
            time += count * self._update_traffic / hardware.card.bandwidth / self.slices(hardware)
        time = max(time, self.exchange_seconds(hardware) if waits else 0.0)
        if self.teacher is not None:
            alone = forward_seconds(self.teacher, self.teacher_placing, hardware)
            time += self._num_passes * self.teacher_serves * max(alone, self._teacher_exchange(hardware) if waits else 0.0)
        return time

    def _seconds_on_host(self, placed: Seconds, hardware: Hardware) -> float:
        """Return the time of a step whose blocks are updated in host memory, from that of a pass."""
        count = self.num_on_host
        width = self.student.dtype.itemsize
        # Of several backwards each waits until its gradients are in the sums.
        adding = count * (_SUM_TRAFFIC + width) / hardware.update_rate if self.accumulation > 1 else 0.0
        update = count * (UPDATE_TRAFFIC + (_AVERAGE_ON_HOST if self.averages else 0)) / hardware.update_rate
        placed = replace(placed, backward=max(placed.backward, adding))
        last = updated_on_host(placed, update if self.clips else update + adding, clips=self.clips)
        return placed.total * (self.accumulation - 1) + last

    @property
    def _num_passes(self) -> int:
        """Passes of the teacher in a step."""
        return 0 if self.teacher_rests else self.teacher_passes * self.accumulation

    def _teacher_exchange(self, hardware: Hardware) -> float:
        return gathered_seconds(self.teacher, self.teacher_slices, hardware) if self.teacher is not None else 0.0

    @property
    def _update_traffic(self) -> int:
        """Bytes a weight that an update on the device reads and writes."""
        masters = _MASTER_TRAFFIC if self.optimiser.masters(self.student.trained) else 0
        return _UPDATE_TRAFFIC + masters + (_CLIP_TRAFFIC if self.clips else 0) + (_AVERAGE_TRAFFIC if self.averages else 0)

    @property
    def is_sliced(self) -> bool:
        """Whether a rank keeps a slice of the student, which is all of it where there is one rank."""
        return self.parallel in ("fsdp", "hsdp")

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
        link = hardware.link_rate
        gradients = sum(each.nbytes for each in self.student.trained)
        between = hardware.network_rate if hardware.num_nodes > 1 else link
        if self.parallel == "hsdp":
            size = self.slices(hardware)
            copies = ranks / size
            inside = (2 * weights * self.accumulation + gradients) * (size - 1) / size / link
            return inside + 2 * gradients / size * (copies - 1) / copies / between
        passed = 2 * weights * self.accumulation + gradients if self.parallel == "fsdp" else 2 * gradients
        return passed * (ranks - 1) / ranks / between

    @cached_property
    def compared(self) -> Use:
        """The student as it is trained: where its blocks learn from the teacher's, with what they are compared with."""
        if not self.matches_features or self.teacher is None:
            return self.student
        return self.student.changed(features=Features(self.teacher.width, self.teacher.dtype))

    @property
    def is_on_host(self) -> bool:
        """Whether the blocks' optimiser is in host memory."""
        return self.placing.is_streamed and self.student.trains == "everything"

    @property
    def optimiser_bytes(self) -> int:
        """What the optimiser keeps, on the device and in host memory."""
        stepped = self.stepped
        return sum((*self.optimiser.masters(stepped), *self.optimiser.state(stepped))) + HOST_STATE * self.num_on_host

    @property
    def num_on_host(self) -> int:
        """Weights that are updated in host memory."""
        return sum(each.numel() for each in self.student.trained) - sum(each.numel() for each in self.stepped)

    @property
    def stepped(self) -> list[nn.Parameter]:
        """What an optimiser on the device changes: all but blocks that are streamed and trained, of which some may stay."""
        if not self.is_on_host:
            return self.student.trained
        streamed = {id(member.tensor) for layout in self.placing.plan(self.student).layouts for member in layout.members}
        return [each for each in self.student.trained if id(each) not in streamed]

    @property
    def _resident(self) -> frozenset[int]:
        """Blocks that stay on the device where the others are streamed and trained."""
        resident = self.placing.resident if self.is_on_host else 0
        return frozenset(spread_evenly(self.student.num_blocks, resident))


@dataclass(frozen=True, kw_only=True)
class Passes:
    """A frozen transformer that is called again and again."""

    use: Use
    placing: Placing = field(default_factory=Placing)
    passes: int = 1
    """Calls a step: two with guidance."""
    held: tuple[int, ...] = ()
    """Bytes of what is held beside it: latents, velocities."""
    slices: int = 1
    """Ranks that have it between them, each a slice of it."""

    def phase(self, hardware: Hardware, *, name: str = "denoising", num_steps: int = 1) -> Phase:
        """Return what it takes."""
        stage = Stage(name, hardware)
        use = self.use.changed(is_streamed=self.placing.is_streamed)
        if self.slices > 1:
            stage.place_slices(use, self.slices)
        else:
            stage.place(use, self.placing)
        stage.scene.hold("", "latents", self.held)
        for _ in range(0 if self.placing.computes_on_host(use, hardware) else 2):
            stage.scene.drop(stage.play(use))
        exchange = self.passes * gathered_seconds(self.use, self.slices, hardware)
        return replace(stage.finished(self.seconds(hardware), num_steps), exchange=exchange, work=self)

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of a step."""
        alone = forward_seconds(self.use, self.placing, hardware)
        return self.passes * max(alone, gathered_seconds(self.use, self.slices, hardware))


def least_kept(use: Use) -> Bytes:
    """Return what a step keeps at least where nothing is recomputed, compiled or not: a fact about Wan's blocks.

    Kept are the inputs and outputs of five products with matrices of the model's width, of two norms and two attentions, and
    the feed-forward's two wide ones, in 16 bits.
    """
    if use.policy != "none" or use.to_host or use.trains == "nothing":
        return Bytes(0)
    a_token = 2 * (12 * use.width + 2 * use.config["ffn_dim"])
    return Bytes(use.batch_size * use.num_tokens * a_token * use.num_blocks)


def batch_bytes(use: Use) -> list[int]:
    """Return what a batch takes: latents, noise, text, sigma."""
    latents = 4 * use.batch_size * torch.Size(use.latent_shape).numel()
    return [latents, latents, 4 * use.batch_size * use.text_tokens * use.config["text_dim"], 4 * use.batch_size]


def _sent_bytes(use: Use) -> int:
    """Return what is in host memory between forward and backward."""
    work = use.tape.work(use.repeats)
    return sum(kernel.num_bytes * count for kernel, count in work.items() if kernel.kind == "to_host")
