"""The student of a distillation, ready to be trained: from its teacher's weights or from random ones, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller.models.channel_adapter import ChannelAdapter
from wandistiller.models.derive_student import derive_student
from wandistiller.models.stored import StoredModel
from wandistiller.models.student_config import StudentPlan


@dataclass(frozen=True)
class Student:
    """A model with what is known about where it comes from."""

    model: nn.Module
    layers: Sequence[int] | None = None
    """The teacher's layers that its own come from; None for a random start."""
    channels: Tensor | None = None
    """Which of the teacher's channels it has; None for all."""
    notes: list[str] = field(default_factory=list)


def make_student(
    plan: StudentPlan,
    teacher: StoredModel,
    *,
    init: Literal["teacher", "random"],
    allow_low_coverage: bool,
    adapter: ChannelAdapter | None = None,
    seed: int,
    device: torch.device,
    prepare: Callable[[nn.Module], None] | None = None,
) -> Student:
    """Build a student in float32; ``prepare`` is called with it before it goes to its device."""
    if init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            student = Student(WanTransformer3DModel(**plan.config), notes=["The student starts from random weights"])
    else:
        derived = derive_student(
            lambda name: teacher.read(name, torch.float32),
            teacher.config,
            plan,
            adapter=adapter,
            allow_low_coverage=allow_low_coverage,
            seed=seed,
        )
        layers = ", ".join(map(str, derived.plan.layers or ()))
        notes = [f"The student starts from layers {layers} of the teacher: {derived.coverage.fraction:.0%} of its weights"]
        student = Student(derived.model, derived.plan.layers, derived.channels, notes)
    if prepare is not None:
        prepare(student.model)
    student.model.requires_grad_(True).train().to(device)
    return student
