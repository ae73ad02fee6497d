"""A step of distillation with the teacher's weights in host memory, against the same with the teacher resident, in one run.

python benchmarks/distill_teacher.py --output benchmarks/results [--small]

The teacher is Wan 14B with random weights, asked about one image a prompt, 8 prompts a step; the student has the size of the
1.3B, float32 weights and AdamW on the card, and computes in bfloat16. ``--small`` takes tiny models, to try it on any machine.
The student is there before the teacher comes, so what the teacher's side costs is the peak while it answers, less what was
there before.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from common import DEVICE, Measurement, RandomWeights, empty_model, fill, measure, release, save
from torch import nn

from wandistiller.data.loader import Batch
from wandistiller.memory.placement import Placed, Subject
from wandistiller.memory.subjects import choose_placement
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, Objectives
from wandistiller.train.optimisation import Optimisation, OptimiserOptions, autocast
from wandistiller.train.teacher import Teacher

WAYS = {"teacher resident": "gpu", "teacher offloaded": "offload"}
MOST_RATIO = 1.10
MOST_TEACHER_GIB = 8.0


@dataclass(frozen=True)
class Case:
    """Who teaches whom, about how much: latents of one image, and tokens of text."""

    teacher: str
    student: str
    height: int
    width: int
    batch: int = 8
    text_tokens: int = 512


LARGE = Case("wan2.1-14b", "wan2.1-1.3b", 60, 104)
SMALL = Case("tiny", "tiny", 8, 8, text_tokens=16)


class OneExpert:
    """A teacher's transformer with random weights, placed as a stored one would be."""

    def __init__(self, size: str, weights: RandomWeights, placement: str) -> None:
        self._model = empty_model(size).requires_grad_(False)
        subject = Subject(model=self._model, blocks=list(self._model.blocks), read=weights, key="random")
        self._placed: Placed = choose_placement(placement).attach(subject, DEVICE)

    def index_at(self, timestep: float) -> int:
        return 0

    def expert(self, index: int) -> nn.Module:
        return self._model

    def keep_up(self) -> None:
        note = self._placed.keep_up()
        if note:
            print(note, flush=True)


class Lesson:
    """A student on the card, and its step with whoever teaches."""

    def __init__(self, case: Case) -> None:
        config = SIZES[case.student].transformer
        empty = build_empty(TRANSFORMER, config, dtype=torch.float32)
        model = fill(empty, RandomWeights(empty), DEVICE).requires_grad_(True).train()
        self.role = Role("student", model, is_trained=True)
        self.precision = "bf16" if DEVICE.type == "cuda" else "no"
        options = OptimiserOptions(rate=1e-5)
        self._optimisation = Optimisation(self.role.trained_parameters, options, self.precision, DEVICE)
        generator = torch.Generator().manual_seed(0)
        shape = (case.batch, config["in_channels"], 1, case.height, case.width)
        tensors = {
            "latents": torch.randn(shape, generator=generator),
            "noise": torch.randn(shape, generator=generator),
            "sigma": torch.rand(case.batch, generator=generator),
            "text": torch.randn(case.batch, case.text_tokens, config["text_dim"], generator=generator),
        }
        self.batch = Batch(tensors, tuple(map(str, range(case.batch))), 0, 0).to(DEVICE)
        # The optimiser's moments come with the first step; they are not the teacher's.
        self.step(self.taught_by(None, Objectives(output=0.0, data=1.0)))

    def taught_by(self, teacher: Teacher | None, objectives: Objectives) -> Distillation:
        return Distillation(self.role, teacher, objectives, guidance_scale=1.0, dtype=torch.float32)

    def step(self, method: Distillation) -> float:
        """Take one step, as the training loop does, and return the loss."""
        with autocast(self.precision, DEVICE):
            losses = method.losses(self.batch)
        self._optimisation.backward(losses.total)
        self._optimisation.step(0)
        return float(losses.total.detach())


def measure_way(case: Case, lesson: Lesson, weights: RandomWeights, way: str, runs: int) -> Measurement:
    release()
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    expert = OneExpert(case.teacher, weights, WAYS[way])
    empty_text = torch.zeros(1, case.text_tokens, SIZES[case.teacher].transformer["text_dim"], device=DEVICE)
    teacher = Teacher(expert, empty_text, device=DEVICE, dtype=torch.bfloat16)
    method = lesson.taught_by(teacher, Objectives(output=1.0))
    what = f"{case.teacher} teaches {case.student}, {case.batch} images"
    row = measure(f"{what}, a step", way, lambda: lesson.step(method), warmup=3, runs=runs)
    release()
    tensors = lesson.batch.tensors
    ask = partial(teacher.answer, tensors["latents"], tensors["sigma"], tensors["text"])
    asked = measure(f"{what}, the answer", way, ask, runs=runs)
    side = asked.peak_gib - before / 2**30 if DEVICE.type == "cuda" else 0.0
    # The student goes on learning from one way to the next, so losses differ; what the teacher says does not.
    size = float(ask().velocity.abs().mean())
    row = replace(row, note=f"teacher's side {side:.2f} GiB, its answer {asked.seconds:.4f} s, of mean size {size:.6f}")
    print(row.note, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--small", action="store_true", help="tiny models, for any machine; nothing is kept")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    case = SMALL if arguments.small else LARGE
    weights = RandomWeights(empty_model(case.teacher))
    lesson = Lesson(case)
    rows = [measure_way(case, lesson, weights, way, arguments.runs) for way in WAYS]
    resident, offloaded = rows
    if resident.seconds and offloaded.seconds:
        ratio = offloaded.seconds / resident.seconds
        print(f"offloaded / resident: {ratio:.3f} (at most {MOST_RATIO:.2f} is wanted, with {MOST_TEACHER_GIB:g} GiB)")
    if not arguments.small:
        save("distill-teacher", rows, arguments.output)


if __name__ == "__main__":
    main()
