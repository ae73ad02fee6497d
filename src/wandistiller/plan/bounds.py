"""The least that a training takes of a card, from shapes alone: what exceeds the card already need not be played through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.memory.estimates import Estimate
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.stage import HOST_STATE, Placing
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Training, batch_bytes, least_kept
from wandistiller.models.shapes import Shapes
from wandistiller.plan.residents import may_have_residents
from wandistiller.train.distill_job import common_patch, read_student, with_sizes
from wandistiller.train.prediction import distill_work, planned_pixels, train_work
from wandistiller.train.vae_prediction import vae_step
from wandistiller.units import Bytes


@dataclass(frozen=True)
class Least:
    """What a training takes of a card at least."""

    held: int = 0
    """Weights and the optimiser's states."""
    kept: int = 0
    """What is kept for backward where nothing is recomputed."""
    update: int = 0
    """Gradients, and what an update needs beside them."""
    host: int = 0
    """Weights and states in the host memory of a machine."""
    may_stay: int = 0
    """What of it is not there for blocks that stay on the card."""

    def total(self, working: int = 0) -> Bytes:
        """All of it, where it is known what another way with the same activations had beside what it held."""
        return Bytes(self.held + max(self.kept, self.update, working))

    def on_host(self, spare: int) -> Bytes:
        """What is in host memory where blocks have ``spare`` bytes of the machine's cards to stay in."""
        return Bytes(self.host - min(self.may_stay, spare))

    def working(self, estimate: Estimate) -> int:
        """Return what a way that was played through had beside what it held, where that was in forward or backward."""
        found = max((phase.passing - self.held for phase in estimate.phases if isinstance(phase.work, Training)), default=0)
        return found if found > 1.001 * self.update else 0


def least_on_card(job: Any, shapes: Shapes, hardware: Hardware) -> Least:
    """Return what a job takes of a card at least; nothing where that is not known without playing it through."""
    if isinstance(job, TrainConfig) and job.placement not in ("cpu", "auto"):
        return least_of_training(train_work(job, shapes, hardware, planned_pixels(job, shapes.vae)), hardware)
    if isinstance(job, DistillConfig):
        student = read_student(job, shapes.transformers[0], shapes.vae)
        job = with_sizes(job, student)
        pixels = planned_pixels(job, shapes.vae, common_patch(student.config, shapes.transformers[0]))
        work = distill_work(job, shapes, student.config, hardware, pixels)
        is_alone = job.strategy in ("sharded", "auto")  # which is no part of what a rank holds, or not yet known
        return least_of_training(replace(work, teacher=None) if is_alone else work, hardware)
    if isinstance(job, TrainVaeConfig):
        least = vae_step(job, shapes, hardware).least(hardware)
        return Least(held=least.held, kept=least.working)
    return Least()


def least_of_training(work: Training, hardware: Hardware) -> Least:
    """Return what a training takes at least."""
    slices = work.slices(hardware)
    student = work.student
    stepped = work.stepped
    held = _weights(student, work.placing) if slices == 1 else sum(each.nbytes for each in student.model.parameters())
    held += sum(batch_bytes(student)) * work.accumulation
    held += sum(work.optimiser.masters(stepped)) + sum(work.optimiser.state(stepped))
    if work.averages:
        held += sum(4 * each.numel() for each in stepped)
    # Those of masters take the place of others, half as large.
    gradients = sum(4 * each.numel() if work.optimiser.has_master(each) else each.nbytes for each in stepped)
    update = gradients + sum(work.optimiser.scratch(stepped))
    teacher = _weights(work.teacher, work.teacher_placing) if work.teacher is not None else 0
    host = may_stay = 0
    if work.teacher is not None:
        host = _on_host(work.teacher, work.teacher_placing)
        may_stay = host if may_have_residents(work.teacher, work.teacher_placing) else 0
    if work.placing.is_streamed:
        on_host = max(hardware.num_cards, 1) * (_on_host(student, work.placing) + HOST_STATE * work.num_on_host)
        host += on_host
        may_stay += on_host if may_have_residents(student, work.placing) else 0
    return Least(held // slices + teacher, least_kept(student), update // slices, host, may_stay)


def _weights(use: Use, placing: Placing) -> int:
    if placing.is_streamed:
        return placing.plan(use).device_bytes
    return sum(each.nbytes for each in use.model.parameters()) if placing.name == "gpu" else 0


def _on_host(use: Use, placing: Placing) -> int:
    """Return what a transformer's weights take of the host at least, once."""
    if placing.name == "cpu":
        return sum(each.nbytes for each in use.model.parameters())
    if not placing.is_streamed:
        return 0
    footprint = placing.footprint(use)
    return footprint.host + footprint.page_locked
