"""What the teacher of a distillation is asked about: a data set or prompts, encoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from wandistiller.data.buckets import Bucket
from wandistiller.data.cached_samples import CachedSamples, Randomness
from wandistiller.data.encode_job import plan_buckets
from wandistiller.data.encoded import EncodedData, encode_data
from wandistiller.data.prompt_samples import PromptSamples
from wandistiller.data.prompt_texts import PromptTexts
from wandistiller.distributed.ranks import read_ranks
from wandistiller.errors import UsageError, shortened
from wandistiller.models.devices import find_dtype
from wandistiller.models.latents import latent_shape, num_tokens
from wandistiller.models.text_padding import can_fold_padding
from wandistiller.train.distill_job import DistillJob
from wandistiller.train.transformer_data import folds_padding, open_samples, prepare_data


@dataclass(frozen=True)
class Questions:
    """What the teacher is asked about: samples, and which of their captions has which text."""

    samples: CachedSamples | PromptSamples
    folds_padding: bool

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        return self.samples.latent_shape(0)


def open_questions(job: DistillJob, saved: Mapping[str, Any] | None = None, ends: ExitStack | None = None) -> Questions:
    """Encode the data set or the prompts; the encoders are gone afterwards.

    ``saved`` is what the state of a run that goes on says of its data. Until ``ends`` closes, a data set's caches stay as they
    are: samples are read from them.
    """
    config = job.config
    if job.prompts is None:
        assert config.teacher_path is not None and config.dataset_path is not None
        found = prepare_data(config, config.teacher_path, config.dataset_path, config.cache_dir, job.device, patch=job.patch)
        if config.cache_teacher:
            _check_one_size(config.dataset_path, found.buckets)
        if ends is not None:
            ends.enter_context(found.using_caches())
        data = encode_data(found)
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
    count = _num_prompts(job, (saved or {}).get("num_prompts"))
    texts.ensure(range(count), device=job.device)
    return Questions(PromptSamples(job.prompts, texts, count, bucket, shape, _randomness(job)), folds)


def open_data(job: DistillJob, data: EncodedData, folds: bool) -> CachedSamples:
    """Return a data set as samples, with sigmas as the run draws them."""
    return open_samples(data, _randomness(job), job.teacher_config, workers=job.config.workers, trims_text=folds)


def _randomness(job: DistillJob) -> Randomness:
    return Randomness(sigma=job.sigma, caption_dropout=job.config.empty_share)


def _check_one_size(place: str, buckets: Iterable[Bucket | None]) -> None:
    """Refuse data whose answers would be of several sizes; nothing has been encoded yet."""
    sizes = sorted({bucket.shape for bucket in buckets if bucket is not None})
    if len(sizes) > 1:
        raise UsageError(
            "--cache-teacher needs samples of one size.",
            why=f"those of {place} are {shortened('x'.join(map(str, size)) for size in sizes)} (frames, height, width).",
            fix="Add --max-aspect 1 for one shape, one number of --frames, and only pictures or only clips; or leave it away.",
        )


def _num_prompts(job: DistillJob, before: int | None) -> int:
    """Return how many prompts are used: as many as before, or no more than the steps can, if nothing else is said."""
    assert job.prompts is not None
    config, total = job.config, len(job.prompts)
    if before is not None:
        asked = before if config.num_prompts is None else config.num_prompts
        if min(asked, total) != before:
            is_fewer = total < before
            raise UsageError(
                f"The run that goes on learns from {before} prompts, and "
                + (f"{config.data_path} has {total}." if is_fewer else f"--num-prompts is {asked}."),
                fix=f"{'Give the same file' if is_fewer else 'Leave it away'}, or start anew in another --output-dir.",
            )
        return before
    if config.num_prompts is not None:
        return min(config.num_prompts, total)
    if config.num_steps is None:
        return total
    needed = config.num_steps * config.batch_size * config.gradient_accumulation * read_ranks().world_size
    is_rollout = config.noisy_source == "trajectories"
    per_prompt = config.rollout_steps * config.rollouts_per_prompt if is_rollout else 1
    return max(min(total, -(-needed // per_prompt)), 1)


def _prompt_bucket(job: DistillJob) -> Bucket:
    """Return the size that prompts are drawn at."""
    config = job.config
    buckets = plan_buckets(job.vae.config, config.width, config.height, config.frames, config.max_aspect, job.patch)
    return next(bucket for bucket in buckets if bucket.frames == config.frames[0])
