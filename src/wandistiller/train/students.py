"""The student of a distillation, ready to be trained: from its teacher's weights or from random ones, on its device."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller.files import complete_or_absent
from wandistiller.models.channel_adapter import ChannelAdapter
from wandistiller.models.derive_student import Coverage, derive_student
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
    coverage: Coverage | None = None
    """How much of it comes from the teacher; None for a random start."""

    @property
    def note(self) -> str:
        """Where it comes from, in a line."""
        if self.coverage is None:
            return "The student starts from random weights"
        layers = ", ".join(map(str, self.layers or ()))
        new = "; new are " + ", ".join(self.coverage.new_parts()) if self.coverage.new_groups() else ""
        return f"The student starts from layers {layers} of the teacher: {self.coverage.fraction:.1%} of its weights{new}"

    def save_facts(self, path: Path, plan: StudentPlan) -> None:
        """Write what it is and where it comes from."""
        facts = {
            "config": dict(plan.config),
            "text_max_length": plan.text_max_length,
            "layers": None if self.layers is None else list(self.layers),
            "coverage": None if self.coverage is None else self.coverage.as_json(),
        }
        with complete_or_absent(path) as partial:
            partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def make_student(
    plan: StudentPlan,
    teacher: StoredModel,
    *,
    init: Literal["teacher", "random"],
    allow_low_coverage: bool,
    adapter: ChannelAdapter | None = None,
    layer_scores: Sequence[float] | None = None,
    seed: int,
    device: torch.device,
    prepare: Callable[[nn.Module], None] | None = None,
) -> Student:
    """Build a student in float32; ``prepare`` is called with it before it goes to its device.

    It has the layers of the highest ``layer_scores`` if there are such, unless the plan names its layers.
    """
    if init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            student = Student(WanTransformer3DModel(**plan.config))
    else:
        derived = derive_student(
            lambda name: teacher.read(name, torch.float32),
            teacher.config,
            plan,
            layer_scores=layer_scores,
            adapter=adapter,
            allow_low_coverage=allow_low_coverage,
            seed=seed,
        )
        student = Student(derived.model, derived.plan.layers, derived.channels, derived.coverage)
    if prepare is not None:
        prepare(student.model)
    student.model.requires_grad_(True).train().to(device)
    return student
