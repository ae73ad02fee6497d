"""What the teacher of a distillation is asked about, and its answers where they are all asked for before training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wandistiller.data.buckets import Bucket, make_buckets
from wandistiller.data.cache_files import fingerprint_weights
from wandistiller.data.cached_samples import CachedSamples, Randomness
from wandistiller.data.encoded import EncodedData
from wandistiller.data.prompt_samples import PromptSamples
from wandistiller.data.prompt_texts import PromptTexts
from wandistiller.data.teacher_records import RecordPlan, Records, RecordSamples, TeacherRecords, Way, record_draws
from wandistiller.distributed.ranks import Ranks, read_ranks
from wandistiller.errors import UsageError
from wandistiller.models.devices import find_dtype
from wandistiller.models.latents import latent_shape, num_tokens
from wandistiller.models.sizes import usual_size
from wandistiller.models.text_padding import can_fold_padding
from wandistiller.train.distill_job import DistillJob
from wandistiller.train.rollout import roll_out
from wandistiller.train.teacher import ServedTeacher, TeacherInStep, TeacherTogether, Teaches
from wandistiller.train.transformer_data import encode_training_data, folds_padding, open_samples


@dataclass(frozen=True)
class Questions:
    """What the teacher is asked about: samples, and which of their captions has which text."""

    samples: CachedSamples | PromptSamples
    folds_padding: bool

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        return self.samples.latent_shape(0)


def open_questions(job: DistillJob) -> Questions:
    """Encode the data set or the prompts; the encoders are gone afterwards."""
    config = job.config
    if job.prompts is None:
        assert config.teacher_path is not None and config.dataset_path is not None
        data = encode_training_data(config, config.teacher_path, config.dataset_path, config.cache_dir, job.device, job.patch)
        folds = folds_padding(job.teacher_config, data)
        samples = open_data(job, data, folds)
        samples.preload()
        return Questions(samples, folds)
    bucket = _prompt_bucket(job)
    shape = latent_shape(job.vae.config, (bucket.frames, bucket.height, bucket.width))
    folds = can_fold_padding(job.teacher_config, num_tokens(job.teacher_config, shape))
    texts = PromptTexts(
        job.prompts,
        config.cache_dir or config.output_dir / "cache",
        text_encoder=job.pipeline.part("text_encoder"),
        tokenizer=job.pipeline.part("tokenizer"),
        dtype=find_dtype(config.dtype, job.device),
        trims_text=folds,
    )
    count = _num_prompts(job)
    texts.ensure(range(count), device=job.device)
    return Questions(PromptSamples(job.prompts, texts, count, bucket, shape, job.sigma), folds)


def open_data(job: DistillJob, data: EncodedData, folds: bool) -> CachedSamples:
    """Return a data set as samples, with sigmas as the run draws them."""
    randomness = Randomness(sigma=job.sigma)
    return open_samples(data, randomness, job.teacher_config, workers=job.config.workers, trims_text=folds)


def _num_prompts(job: DistillJob) -> int:
    """Return how many prompts are used: no more than the steps can, if nothing else is said."""
    assert job.prompts is not None
    config, total = job.config, len(job.prompts)
    if config.num_prompts is not None:
        return min(config.num_prompts, total)
    if config.num_steps is None:
        return total
    needed = config.num_steps * config.batch_size * config.gradient_accumulation * read_ranks().world_size
    is_rollout = config.noisy_source == "trajectories"
    per_prompt = config.rollout_steps * config.rollouts_per_prompt if is_rollout else 1
    return max(min(total, -(-needed // per_prompt)), 1)


def _prompt_bucket(job: DistillJob) -> Bucket:
    """Return the size that prompts are drawn at: what is asked for, or one picture of what is usual."""
    config, usual = job.config, usual_size(job.vae.config)
    height, width = config.height or usual.height, config.width or usual.width
    frames = config.frames[0] if config.frames else 1
    spatial, temporal = job.vae.config["scale_factor_spatial"], job.vae.config["scale_factor_temporal"]
    sizes = {"multiple": spatial * job.patch, "temporal": temporal, "max_aspect": 1.0}
    buckets = make_buckets(width, height, frame_counts=(frames,), **sizes)
    return next(bucket for bucket in buckets if bucket.frames == frames)


def ask_once(job: DistillJob, questions: Questions, teacher: Teaches | None, ranks: Ranks) -> RecordSamples:
    """Ask the teacher everything that the student will learn, and keep it on disk."""
    config = job.config
    assert teacher is not None
    plan = _record_plan(job, questions)
    records = TeacherRecords((config.cache_dir or config.output_dir / "cache") / "teacher" / plan.name, plan)
    # Rank 0 alone, where it alone has the teacher.
    asked = teacher if not isinstance(teacher, ServedTeacher) else teacher.alone()
    is_in_step = isinstance(teacher, TeacherInStep | TeacherTogether)
    way: Way = "first" if isinstance(teacher, ServedTeacher) else "in_step" if is_in_step else "shared"
    records.fill(partial(_ask, job, questions, asked), ranks, way)
    texts: Callable[[int], Tensor] = questions.samples.text
    return RecordSamples(records, questions.samples.buckets[0], texts)


def _record_plan(job: DistillJob, questions: Questions) -> RecordPlan:
    config = job.config
    count = len(questions.samples)
    is_rollout = config.noisy_source == "trajectories"
    if not is_rollout and len(set(questions.samples.buckets)) > 1:
        raise UsageError(
            "--cache-teacher needs samples of one size.", fix="Add --max-aspect 1 and one number of --frames, or leave it away."
        )
    size = min(config.rollout_batch, count)
    about: dict[str, Any] = {
        "teacher": [fingerprint_weights(stored.weights, stored.names)[:16] for stored in job.teachers],
        "captions": _fingerprint(questions.samples),
        "count": count,
        "shape": list(questions.latent_shape),
        "guidance": config.guidance_scale if is_rollout or config.guidance_weight else 1.0,
        "learns": "guided" if config.guidance_weight else "plain",
        "way": f"{job.pipeline.solver}, {config.rollout_steps} steps" if is_rollout else f"{config.teacher_draws} draws",
        "shift": job.shift,
        "seed": config.seed,
        "batch": size,
        "rounds": config.rollouts_per_prompt if is_rollout else 1,
    }
    shards = count // size * about["rounds"]  # a rest that fills no shard is left out
    per_item = config.rollout_steps if is_rollout else config.teacher_draws
    return RecordPlan(about, questions.latent_shape, shards, size * per_item)


def _fingerprint(samples: CachedSamples | PromptSamples) -> str:
    """Hash all captions, and the names of what they belong to."""
    digest = hashlib.sha256()
    for index in range(len(samples)):
        digest.update(f"{samples.name(index)}\0{samples.caption(index)}\0".encode())
    return digest.hexdigest()[:16]


def _ask(job: DistillJob, questions: Questions, teacher: Teaches | None, number: int) -> Records:
    """Return the shard with a number."""
    config, samples = job.config, questions.samples
    assert teacher is not None
    size = min(config.rollout_batch, len(samples))
    round_number, place = divmod(number, len(samples) // size)
    items = range(place * size, (place + 1) * size)
    scale = config.guidance_scale
    if config.noisy_source != "trajectories":
        assert isinstance(samples, CachedSamples)
        learnt = scale if config.guidance_weight else 1.0
        return record_draws(samples, items, config.teacher_draws, config.seed, partial(_answer, job, teacher, learnt))
    text = torch.nn.utils.rnn.pad_sequence([samples.text(item) for item in items], batch_first=True)
    return roll_out(
        teacher,
        text.to(job.device),
        items,
        questions.latent_shape,
        solver=job.pipeline.solver,
        num_steps=config.rollout_steps,
        shift=job.shift,
        scale=scale,
        learns_guided=bool(config.guidance_weight),
        seed=config.seed + round_number,
        device=job.device,
    )


def _answer(job: DistillJob, teacher: Teaches, scale: float, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    moved = (each.to(job.device) for each in (noisy, sigma, text))
    return teacher.answer(*moved, scale=scale).velocity.cpu()
