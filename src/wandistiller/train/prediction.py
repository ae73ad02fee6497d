"""What a training of a transformer will take, from its configuration and the models' shapes: no weights, no card."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.config.training import TrainingConfig
from wandistiller.config.transformer_training import TransformerTrainingConfig
from wandistiller.data.buckets import Bucket, largest_bucket
from wandistiller.data.encode_job import PATCH, plan_buckets
from wandistiller.errors import UsageError
from wandistiller.memory.encoder_phases import Decoding, Encoding, text_phase
from wandistiller.memory.estimates import Estimate, Item, Phase, Samples, most_that_fits
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Adapters, PixelDecoder, Use
from wandistiller.memory.works import Drawing, Passes, Training, foreseen_placing
from wandistiller.models.devices import DTYPES, find_dtype
from wandistiller.models.latents import latent_shape
from wandistiller.models.shapes import Shapes
from wandistiller.train.distill_job import check_student, common_patch, read_student, with_sizes
from wandistiller.train.methods.distill import Objectives
from wandistiller.train.optimisation import MixedPrecision
from wandistiller.train.runs import choose_precision
from wandistiller.units import Bytes

_SAMPLES = 1000
"""Samples to count caches by: how many there are is known when they are read."""
Pixels = tuple[int, int, int]
"""Frames, height and width of samples."""


def planned_pixels(config: TransformerTrainingConfig | TrainVaeConfig, vae: Mapping[str, Any], patch: int = PATCH) -> Pixels:
    """Return the size of the largest samples that a configuration sorts its data into; ``patch`` is as in ``plan_buckets``."""
    buckets = plan_buckets(vae, config.width, config.height, config.frames, config.max_aspect, patch)
    return largest_bucket(buckets).shape


def samples_of(config: TransformerTrainingConfig | TrainVaeConfig, pixels: Pixels) -> Samples:
    """Return what a step is about, of samples of a size."""
    return Samples(*pixels, batch_size=config.batch_size, num_batches=config.gradient_accumulation)


def drawn_pixels(
    config: TransformerTrainingConfig, data: Iterable[Bucket | None], held_out: Iterable[Bucket | None] | None
) -> Pixels | None:
    """Return the size of the largest that is drawn while training: samples are as the data, marks as the held-out data."""
    drawn = [largest_bucket(data)] if config.sample_every else []
    if config.judge_samples and held_out is not None:
        drawn.append(largest_bucket(held_out))
    return largest_bucket(drawn).shape if drawn else None


def _recordings(config: TransformerTrainingConfig, vae: Mapping[str, Any]) -> float:
    """Return how many shapes of batches --cuda-graphs may have to record, pictures too, by their share of the largest."""
    if not config.cuda_graphs:
        return 0.0
    buckets = plan_buckets(vae, config.width, config.height, config.frames, config.max_aspect)
    shapes = {bucket.shape for bucket in buckets} | {replace(bucket, frames=1).shape for bucket in buckets}
    latents = [math.prod(latent_shape(vae, shape)) for shape in shapes]
    return sum(latents) / max(latents)


def predict_train(config: TrainConfig, shapes: Shapes, hardware: Hardware) -> Estimate:
    """Return what ``train`` takes."""
    pixels = planned_pixels(config, shapes.vae)
    work = train_work(config, shapes, hardware, pixels)
    training = work.phase(hardware, num_steps=config.num_steps or 1000)
    if config.placement == "auto":
        chosen = foreseen_placing(work.student, training, hardware)
        training = replace(work, placing=chosen).phase(hardware, num_steps=config.num_steps or 1000)
    phases = (*encoding_phases(config, shapes, hardware), training)
    disk = (*_caches(config, shapes), *_results(work, config))
    return Estimate(phases=phases, samples=samples_of(config, pixels), disk=disk, ranks=max(hardware.num_cards, 1))


def train_work(
    config: TrainConfig, shapes: Shapes, hardware: Hardware, pixels: Pixels, drawn: Pixels | None = None
) -> Training:
    """Return the training itself, on samples of a size; ``drawn`` is that of the pictures, where it is another."""
    weights = DTYPES[config.weights_dtype]
    through = PixelDecoder(shapes.vae, config.vae_gradient_checkpointing) if config.pixel_loss_weight else None
    student = Use(
        name="student",
        config=shapes.transformers[-1 if config.expert == "low" else 0],
        latent_shape=latent_shape(shapes.vae, pixels),
        batch_size=config.batch_size,
        dtype=weights,
        stored_dtype=shapes.stored_dtype,
        trains="adapters" if config.lora_rank else "everything",
        adapters=Adapters(config.lora_rank, config.lora_targets) if config.lora_rank else None,
        precision=foreseen_precision(config, hardware, weights),
        policy=config.policy,
        to_host=config.activations_to_host,
        is_compiled=config.torch_compile,
        pixels=through,
    )
    name = "gpu" if config.placement == "auto" else config.placement
    return Training(
        student=student,
        placing=Placing(name=name, resident=0 if config.resident == "auto" else int(config.resident)),
        optimiser=OptimiserChoice(config.optimizer_name, config.rounding),
        averages=config.use_ema,
        accumulation=config.gradient_accumulation,
        clips=config.clip_norm > 0,
        recordings=_recordings(config, shapes.vae),
        drawing=_drawing(config, shapes, student, drawn or pixels),
        parallel=config.parallel,
        shard_size=config.shard_size,
    )


def predict_distill(config: DistillConfig, shapes: Shapes, hardware: Hardware) -> Estimate:
    """Return what ``distill`` takes."""
    if config.teacher_context_parallel > 1:
        raise UsageError(
            "There is no plan yet for ranks that ask a teacher together.",
            fix="Leave --teacher-context-parallel away: what the teacher computes with is then divided by the ranks.",
        )
    plan = read_student(config, shapes.transformers[0], shapes.vae)
    config = with_sizes(config, plan).with_guidance(shapes.size.guidance)
    pixels = planned_pixels(config, shapes.vae, common_patch(plan.config, shapes.transformers[0]))
    work = distill_work(config, shapes, plan.config, hardware, pixels)
    if work.teacher is not None:
        work = work.with_teacher(_as_spread(work.teacher_placing, work, hardware))
    phases = [*encoding_phases(config, shapes, hardware)]
    if config.is_stored:
        phases.append(asking_phase(config, shapes, hardware, pixels))
    num_steps = config.num_steps or 1000
    training = work.phase(hardware, num_steps=num_steps)
    if config.strategy == "auto" and work.teacher is not None:
        chosen = foreseen_placing(work.teacher, training, hardware)
        training = work.with_teacher(chosen).phase(hardware, num_steps=num_steps)
    disk = (*_caches(config, shapes), *_records(config, shapes), *_results(work, config))
    samples = samples_of(config, pixels)
    return Estimate(phases=(*phases, training), samples=samples, disk=disk, ranks=max(hardware.num_cards, 1))


def check_planned_student(config: DistillConfig, shapes: Shapes) -> None:
    """Raise ``UsageError`` for a student that would be refused when it is to learn; no data are looked at."""
    plan = read_student(config, shapes.transformers[0], shapes.vae)
    check_student(with_sizes(config, plan), plan, shapes.transformers, shapes.vae, has_data=False)


def asking_phase(config: DistillConfig, shapes: Shapes, hardware: Hardware, pixels: Pixels) -> Phase:
    """Return what it takes to ask the teacher everything before training."""
    work = asking_work(config, shapes, hardware, pixels)
    work = replace(work, placing=_as_spread(work.placing, work, hardware))
    asking = work.phase(hardware, name="asking the teacher", num_steps=config.rollout_steps)
    if config.strategy != "auto":
        return asking
    placing = foreseen_placing(work.use, asking, hardware)
    work = replace(work, placing=placing, use=work.use.changed(is_streamed=placing.is_streamed))
    return work.phase(hardware, name="asking the teacher", num_steps=config.rollout_steps)


def asking_work(config: DistillConfig, shapes: Shapes, hardware: Hardware, pixels: Pixels) -> Passes:
    """Return how the teacher is asked everything before training, on samples of a size."""
    use = _teacher(config, shapes, hardware, pixels)
    # Along trajectories a solver holds noise, latents and a few velocities, in float32 as the texts.
    num_latents = 6 if config.noisy_source == "trajectories" else 2
    held = (4 * use.batch_size * math.prod(use.latent_shape),) * num_latents
    return Passes(
        use=use,
        placing=_teacher_placing(config),
        passes=_teacher_passes(config),
        held=(*held, 4 * use.batch_size * use.text_tokens * use.config["text_dim"]),
        slices=_teacher_slices(config, hardware),
    )


def distill_work(
    config: DistillConfig,
    shapes: Shapes,
    student: Mapping[str, Any],
    hardware: Hardware,
    pixels: Pixels,
    drawn: Pixels | None = None,
) -> Training:
    """Return the training itself, on samples of a size, with the teacher if it is asked meanwhile.

    ``drawn`` is the size of the pictures, where it is another.
    """
    latents = latent_shape(shapes.vae, pixels)
    passes = _teacher_passes(config) if config.asks_while_training else 0
    use = Use(
        name="student",
        config=student,
        latent_shape=(student["in_channels"], *latents[1:]),
        batch_size=config.batch_size,
        dtype=torch.float32,
        trains="everything",
        precision=foreseen_precision(config, hardware),
        policy=config.policy,
        to_host=config.activations_to_host,
        is_compiled=config.torch_compile,
    )
    return Training(
        student=use,
        optimiser=OptimiserChoice(config.optimizer_name),
        averages=config.use_ema,
        accumulation=config.gradient_accumulation,
        clips=config.clip_norm > 0,
        recordings=_recordings(config, shapes.vae),
        drawing=_drawing(config, shapes, use, drawn or pixels),
        parallel=config.parallel,
        shard_size=config.shard_size,
        teacher=_teacher(config, shapes, hardware, pixels) if passes else None,
        teacher_placing=_teacher_placing(config),
        teacher_passes=passes,
        teacher_rests=config.is_stored,
        teacher_slices=_teacher_slices(config, hardware),
        teacher_serves=hardware.num_ranks if config.strategy == "gpu0" else 1,
        matches_features=config.feature_weight > 0,
    )


def _teacher_passes(config: DistillConfig) -> int:
    """Return how often the teacher computes for one answer."""
    if not Objectives.of(config).needs_teacher:
        return 0
    is_guided = config.guidance > 1 and (config.noisy_source == "trajectories" or config.guidance_weight > 0)
    return 2 if is_guided else 1


def _teacher(config: DistillConfig, shapes: Shapes, hardware: Hardware, pixels: Pixels) -> Use:
    return Use(
        name="teacher",
        config=shapes.transformers[0],
        latent_shape=latent_shape(shapes.vae, pixels),
        batch_size=config.rollout_batch if config.is_stored else config.batch_size,
        dtype=_teacher_dtype(config, hardware),
        stored_dtype=shapes.stored_dtype,
        is_streamed=_teacher_placing(config).is_streamed,
    )


def _teacher_placing(config: DistillConfig) -> Placing:
    """Return where the teacher lives; ``auto`` is the card until it has been chosen, and for gpu0 it is that of rank 0."""
    name = "gpu" if config.strategy in ("gpu0", "auto", "sharded") else config.strategy
    resident = 0 if config.teacher_resident == "auto" else int(config.teacher_resident)
    return Placing(
        name=name,
        resident=resident,
        eight_bit=config.teacher_dtype == "float8",
        device_map=config.teacher_device_map,
    )


def within_cards(work: Training | Passes, hardware: Hardware, free: Mapping[int | str, int]) -> dict[int | str, int]:
    """Return the limits of a teacher that is spread over a process's cards.

    It may have what is free of them but for what it computes with, and of the first named but for all that a student takes.
    """
    if isinstance(work, Passes):
        beside = replace(work, placing=Placing()).phase(hardware).beside("teacher")
        kept = {"first": beside, "others": beside}
    else:
        assert work.teacher is not None
        alone = Passes(use=work.teacher, passes=work.teacher_passes)
        kept = {
            "first": work.with_teacher(Placing()).phase(hardware).beside("teacher"),
            "others": alone.phase(hardware).beside("teacher"),
        }
    first = next(card for card in free if isinstance(card, int))
    return {
        card: max(most_that_fits(size) - kept["first" if card == first else "others"], 0) if card != "cpu" else size
        for card, size in free.items()
    }


def _as_spread(placing: Placing, work: Training | Passes, hardware: Hardware) -> Placing:
    """Return a placing with the limits that it has on a machine with empty cards, where it needs any."""
    if placing.name not in ("balanced", "sequential") or hardware.card is None:
        return placing
    free: dict[int | str, int] = dict.fromkeys(range(hardware.cards_each), hardware.room)
    free["cpu"] = hardware.host_memory
    return replace(placing, max_memory=within_cards(work, hardware, free))


def _teacher_slices(config: DistillConfig, hardware: Hardware) -> int:
    """Return in how many slices ranks have the teacher: those that share the student, else those of a machine."""
    if config.strategy != "sharded":
        return 1
    here = max(hardware.num_cards, 1)
    return {"fsdp": hardware.num_ranks, "hsdp": config.shard_size or here}.get(config.parallel, here)


def _drawing(config: TransformerTrainingConfig, shapes: Shapes, student: Use, pixels: Pixels) -> Drawing | None:
    """Return the pictures of a size that are drawn while training, where they are asked for."""
    if not config.sample_every and not config.judge_samples:
        return None
    latents = latent_shape(shapes.vae, pixels)
    frozen = student.changed(
        latent_shape=(student.latent_shape[0], *latents[1:]),
        trains="nothing",
        batch_size=1,
        policy="none",
        to_host=False,
        pixels=None,
    )
    return Drawing(student=frozen, decoding=Decoding(config=shapes.vae, latent_shape=latents, dtype=torch.float32))


def encoding_phases(config: TransformerTrainingConfig, shapes: Shapes, hardware: Hardware) -> list[Phase]:
    """Return the phases in which captions and media are encoded, once for all."""
    dtype = find_dtype(config.dtype, _foreseen_device(hardware))
    found = []
    encoder = shapes.text_encoder_model()
    if encoder is not None:
        found.append(text_phase(encoder, hardware, dtype, ranks=max(hardware.num_cards, 1)))
    if config.dataset_path is not None:
        found.append(media_phase(config, shapes, hardware))
    return found


def media_phase(config: TransformerTrainingConfig, shapes: Shapes, hardware: Hardware) -> Phase:
    """Return the phase in which the VAE encodes pictures and clips."""
    pixels = (3, *planned_pixels(config, shapes.vae))
    dtype = find_dtype(config.dtype if config.vae_dtype == "auto" else config.vae_dtype, _foreseen_device(hardware))
    media = Encoding(config=shapes.vae, pixel_shape=pixels, dtype=dtype, is_tiled=config.vae_tiling)
    return media.phase(hardware)


def foreseen_precision(config: TrainingConfig, hardware: Hardware, weights: torch.dtype = torch.float32) -> MixedPrecision:
    """Return what is computed in 16 bits on such hardware."""
    return choose_precision(config, _foreseen_device(hardware), weights)


def _foreseen_device(hardware: Hardware) -> torch.device:
    return torch.device("cpu" if hardware.card is None else "cuda")


def _teacher_dtype(config: DistillConfig, hardware: Hardware) -> torch.dtype:
    if config.teacher_dtype in ("auto", "float8"):
        return torch.bfloat16 if hardware.card is not None else torch.float32
    return DTYPES[config.teacher_dtype]


def _results(work: Training, config: TransformerTrainingConfig) -> list[Item]:
    """Return what a training writes: the result, which of adapters is in two dialects, and states, one more than are kept while
    it is being written; a state has weights, what the optimiser has, and the average.
    """
    trained = work.student.trained
    weights = sum(each.nbytes for each in trained)
    optimiser = work.optimiser_bytes
    average = sum(4 * each.numel() for each in trained) if config.use_ema else 0
    return [
        Item("student", "states", "disk", Bytes((config.keep + 1) * (weights + optimiser + average))),
        Item("student", "result", "disk", Bytes(weights * (2 if work.student.trains == "adapters" else 1))),
    ]


def _caches(config: TransformerTrainingConfig, shapes: Shapes) -> list[Item]:
    """Return what encoders write for every thousand samples: embeddings as long as they can be, and latents in float32."""
    width = shapes.transformers[0]["text_dim"] * (4 if config.dtype == "float32" else 2)
    found = [Item("text", f"cache for {_SAMPLES} captions of full length", "disk", Bytes(_SAMPLES * 512 * width))]
    if config.dataset_path is not None:
        latents = torch.Size(latent_shape(shapes.vae, planned_pixels(config, shapes.vae))).numel()
        found.append(Item("latents", f"cache for {_SAMPLES} samples", "disk", Bytes(4 * _SAMPLES * latents)))
    return found


def _records(config: DistillConfig, shapes: Shapes) -> list[Item]:
    """Return what is kept of the teacher, two latents for each question; of prompts that nobody has counted, of a thousand."""
    if not config.is_stored:
        return []
    latents = torch.Size(latent_shape(shapes.vae, planned_pixels(config, shapes.vae))).numel()
    is_rollout = config.noisy_source == "trajectories"
    each = config.rollouts_per_prompt * config.rollout_steps if is_rollout else config.teacher_draws
    count = config.num_prompts or _SAMPLES
    of = "prompts" if is_rollout else "samples"
    # In 16 bits. Where they are replaced: the first round, the last one, and the next while it is made.
    rounds = 3 if config.refresh_every else 1
    return [Item("teacher", f"records for {count} {of}", "disk", Bytes(rounds * 2 * 2 * count * each * latents))]
