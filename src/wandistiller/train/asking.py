"""What the student learns from a teacher that is asked beforehand: every question in a shard, its answers on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wandistiller.data.cache_files import fingerprint_model
from wandistiller.data.cached_samples import CachedSamples
from wandistiller.data.teacher_records import (
    RecordPlan,
    Records,
    RecordSamples,
    Shard,
    TeacherRecords,
    Way,
    differences,
    read_draw,
    record_draws,
)
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import UsageError
from wandistiller.memory.monitor import Monitor
from wandistiller.terminal import progress
from wandistiller.train.callbacks import Callback
from wandistiller.train.distill_job import DistillJob
from wandistiller.train.questions import Questions
from wandistiller.train.rollout import roll_out
from wandistiller.train.teacher import ServedTeacher, TeacherInStep, TeacherTogether, Teaches, teacher_dtype

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop


_MANY = 100_000
"""Captions from which on it takes long enough to look at all of them that a bar is shown."""


class Asking:
    """Asks a teacher everything that the student will learn; ranks do it together."""

    def __init__(
        self, job: DistillJob, questions: Questions, teacher: Teaches, ranks: Ranks, monitor: Monitor, step: int = 0
    ) -> None:
        """``step`` is how many steps the run has made already."""
        self._job = job
        self._questions = questions
        self._teacher = teacher
        self._ranks = ranks
        self._monitor = monitor
        self.round_number = self.round_at(step)
        """Which answers there are: a round is as many questions as there are at the start, each from other noise."""
        self._is_rollout = job.config.noisy_source == "trajectories"

    def round_at(self, step: int) -> int:
        """Return the round that a step learns from."""
        every = self._job.config.refresh_every
        return step // every if every else 0

    def ask(self) -> RecordSamples:
        """Return all answers as samples; what is on disk already is not asked again."""
        records = self.records()
        samples = self._questions.samples
        made_of = None
        if self._job.config.data_weight:
            assert isinstance(samples, CachedSamples)
            made_of = partial(_made_of, samples, self._job.config.seed)
        return RecordSamples(records, samples.buckets[0], samples.text, samples.empty_text, made_of)

    def records(self) -> TeacherRecords:
        """Return the answers of the round; what of them is not on disk is asked for."""
        plan, config = self.plan(), self._job.config
        if self.round_number:
            # The run's own: nobody else needs them, and only one round of them is kept.
            records = TeacherRecords(config.output_dir / "cache" / "refreshed" / plan.name, plan)
        else:
            records = TeacherRecords((config.cache_dir or config.output_dir / "cache") / "teacher" / plan.name, plan)
        serves = isinstance(self._teacher, ServedTeacher)
        way: Way = "first" if serves else "in_step" if self._is_in_step else "shared"
        with self._monitor.phase("asking the teacher", "teacher"):
            records.fill(self._answer, self._ranks, way)
        if self.round_number:
            records.remove_earlier(self._ranks)
        return records

    @property
    def _is_in_step(self) -> bool:
        """Whether all ranks have to ask at the same time."""
        return isinstance(self._teacher, TeacherInStep | TeacherTogether)

    def release(self) -> None:
        """Give the teacher's memory back."""
        self._teacher.release()

    def plan(self) -> RecordPlan:
        """Return what there is to ask; nothing is loaded for it."""
        return RecordPlan(self._about, self._questions.latent_shape, list(self._shards()))

    def facts(self) -> dict[str, Any]:
        """Return what the run learns from, in words and numbers that are the same for as long as it goes on."""
        config = self._job.config
        return {
            **self._about,
            "number of captions": len(self._questions.samples),
            "captions": _digest("\0".join(self._origins.values()).encode()),
            "--rollout-batch": config.rollout_batch,
            "--refresh-every": config.refresh_every,
            "draws": config.rollouts_per_prompt if self._is_rollout else config.teacher_draws,
        }

    def check(self, saved: Mapping[str, Any] | None) -> None:
        """Refuse to go on with a run on other data than it has; ``saved`` is what ``facts`` gave then."""
        differing = differences(saved, self.facts()) if saved else ""
        if differing:
            raise UsageError(
                "The run that goes on has learnt from other answers of the teacher.",
                why=f"{differing}.",
                fix="Give the flags and files that it was started with, or start anew in another --output-dir.",
            )

    @cached_property
    def _about(self) -> dict[str, Any]:
        """What all answers depend on; what only some of them do is in the names of their shards."""
        job, config = self._job, self._job.config
        is_guided = self._is_rollout or config.guidance_weight
        dtype = teacher_dtype(config.teacher_dtype, job.device)
        found: dict[str, Any] = {
            "teacher": [fingerprint_model(stored)[:16] for stored in job.teachers],
            "precision": config.teacher_dtype if config.teacher_dtype == "float8" else str(dtype).removeprefix("torch."),
            "boundary": job.pipeline.boundary if len(job.teachers) > 1 else None,
            "shape": list(self._questions.latent_shape),
            "guidance": config.guidance if is_guided else 1.0,
            "learns": "guided" if config.guidance_weight else "plain",
            "empty caption": _digest(self._questions.samples.empty_text.numpy().tobytes()),
            "seed": config.seed,
        }
        if config.empty_share:
            found["--caption-dropout"] = config.empty_share
        if self._is_rollout:
            return {**found, "way": f"{job.solver}, {config.rollout_steps} steps", "shift": job.shift}
        return {**found, "way": "draws", "sigma": asdict(job.sigma)}

    @cached_property
    def _origins(self) -> dict[range, str]:
        """What is asked together, with its fingerprint; the last may be fewer."""
        samples, size = self._questions.samples, self._job.config.rollout_batch
        parts = [range(start, min(start + size, len(samples))) for start in range(0, len(samples), size)]
        found = {}
        is_long = len(samples) > _MANY
        with progress("Captions", len(samples), "caption") if is_long else nullcontext(lambda amount: None) as advance:
            for part in parts:
                found[part] = _digest("\0".join(samples.fingerprint(item) for item in part).encode())
                advance(len(part))
        return found

    def _shards(self) -> Iterator[Shard]:
        config = self._job.config
        num_draws = config.rollouts_per_prompt if self._is_rollout else config.teacher_draws
        draws = range(self.round_number * num_draws, (self.round_number + 1) * num_draws)
        if self._is_rollout:
            for draw in draws:
                for items, origin in self._origins.items():
                    yield Shard(items, range(draw, draw + 1), origin, len(items) * config.rollout_steps)
            return
        for items, origin in self._origins.items():
            yield Shard(items, draws, origin, len(items) * num_draws)

    def _answer(self, shard: Shard) -> Records:
        """Return what the teacher says to a shard's questions."""
        job, config, samples = self._job, self._job.config, self._questions.samples
        # Rank 0 alone, where it alone has the teacher.
        teacher = self._teacher.alone() if isinstance(self._teacher, ServedTeacher) else self._teacher
        assert teacher is not None
        if not self._is_rollout:
            assert isinstance(samples, CachedSamples)
            scale = config.guidance if config.guidance_weight else 1.0
            return record_draws(samples, shard, config.seed, partial(self._velocity, teacher, scale))
        text = torch.nn.utils.rnn.pad_sequence([samples.text(item) for item in shard.items], batch_first=True)
        return roll_out(
            teacher,
            text.to(job.device),
            shard.items,
            self._questions.latent_shape,
            solver=job.solver,
            num_steps=config.rollout_steps,
            shift=job.shift,
            scale=config.guidance,
            learns_guided=bool(config.guidance_weight),
            empty_text=samples.empty_text if config.empty_share else None,
            empty_share=config.empty_share,
            asks_in_step=self._is_in_step,
            seed=config.seed,
            draw=shard.draws.start,
            device=job.device,
        )

    def _velocity(self, teacher: Teaches, scale: float, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        moved = (each.to(self._job.device) for each in (noisy, sigma, text))
        return teacher.answer(*moved, scale=scale).velocity.cpu()


class RefreshAnswers(Callback):
    """Lets the samples be those of the round that each step belongs to."""

    def __init__(self, asking: Asking, samples: RecordSamples) -> None:
        self._asking = asking
        self._samples = samples

    def stepping(self, loop: Loop) -> None:
        number = self._asking.round_at(loop.step)
        if number != self._asking.round_number:
            with loop.clock.pause():
                loop.read_anew()
                self._asking.round_number = number
                self._samples.records = self._asking.records()
                self._asking.release()


def _made_of(samples: CachedSamples, seed: int, item: int, draw: int) -> dict[str, Tensor]:
    """Return the latents and the noise of a record of a data set: not kept on disk, as they can be had again."""
    drawn = read_draw(samples, item, draw, seed)
    return {name: drawn[name] for name in ("latents", "noise")}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
