"""What a training of a transformer will take, from its configuration and the models' shapes: no weights, no card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.config.training import TrainingConfig
from wandistiller.config.transformer_training import TransformerTrainingConfig
from wandistiller.data.buckets import largest_bucket
from wandistiller.data.encode import plan_buckets
from wandistiller.errors import UsageError
from wandistiller.memory.encoder_phases import encode_phase, text_phase
from wandistiller.memory.estimates import Estimate, Item, Phase
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Adapters, Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.devices import DTYPES
from wandistiller.models.latents import latent_shape
from wandistiller.models.shapes import Shapes
from wandistiller.models.student_config import read_student_config
from wandistiller.train.distill_job import with_sizes
from wandistiller.train.optimisation import MixedPrecision
from wandistiller.train.runs import choose_precision
from wandistiller.units import Bytes

Pixels = tuple[int, int, int]
"""Frames, height and width of samples."""


def planned_pixels(config: TransformerTrainingConfig | TrainVaeConfig, vae: Mapping[str, Any]) -> Pixels:
    """Return the size of the largest samples that a configuration sorts its data into."""
    buckets = plan_buckets(vae, config.width, config.height, config.frames, config.max_aspect)
    return largest_bucket(buckets).shape


def predict_train(config: TrainConfig, shapes: Shapes, hardware: Hardware) -> Estimate:
    """Return what ``train`` takes."""
    work = train_work(config, shapes, hardware, planned_pixels(config, shapes.vae))
    training = work.phase(hardware, num_steps=config.num_steps or 1000)
    count = sum(each.numel() for each in work.student.trained)
    disk = (Item("student", "states", "disk", _state_bytes(count, config)), Item("student", "result", "disk", Bytes(4 * count)))
    return Estimate(phases=(*encoding_phases(config, shapes, hardware), training), disk=disk)


def train_work(config: TrainConfig, shapes: Shapes, hardware: Hardware, pixels: Pixels) -> Training:
    """Return the training itself, on samples of a size."""
    weights = DTYPES[config.weights_dtype]
    student = Use(
        name="student",
        config=shapes.transformers[-1 if config.expert == "low" else 0],
        latent_shape=latent_shape(shapes.vae, pixels),
        batch_size=config.batch_size,
        dtype=weights,
        trains="adapters" if config.lora_rank else "everything",
        adapters=Adapters(config.lora_rank, config.lora_targets) if config.lora_rank else None,
        precision=foreseen_precision(config, hardware, weights),
        policy=config.policy,
        to_host=config.activations_to_host,
        is_compiled=config.torch_compile,
    )
    return Training(
        student=student,
        placing=Placing(name=config.placement, resident=0 if config.resident == "auto" else int(config.resident)),
        optimiser=OptimiserChoice(config.optimizer_name, config.rounding),
        averages=config.use_ema,
        accumulation=config.gradient_accumulation,
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
    factors = {"spatial_factor": shapes.vae["scale_factor_spatial"], "temporal_factor": shapes.vae["scale_factor_temporal"]}
    plan = read_student_config(config.student_config, dict(shapes.transformers[0]), **factors)
    config = with_sizes(config, plan)
    work = distill_work(config, shapes, plan.config, hardware, planned_pixels(config, shapes.vae))
    phases = [*encoding_phases(config, shapes, hardware)]
    if config.is_stored:
        assert work.teacher is not None
        asking = Passes(use=work.teacher, placing=work.teacher_placing, passes=work.teacher_passes)
        phases.append(asking.phase(hardware, name="asking the teacher", num_steps=config.rollout_steps))
    training = distill_phase(config, work, hardware, num_steps=config.num_steps or 1000)
    count = plan.num_parameters()
    disk = [Item("student", "states", "disk", _state_bytes(count, config)), Item("student", "result", "disk", Bytes(4 * count))]
    if config.is_stored:
        records = (config.num_prompts or 1) * config.rollouts_per_prompt * config.rollout_steps
        latents = torch.Size(work.student.latent_shape).numel()
        # Where they are replaced: the first round, the last one, and the next while it is made.
        rounds = 3 if config.refresh_every else 1
        disk.append(Item("teacher", "records", "disk", Bytes(rounds * 4 * records * latents)))
    return Estimate(phases=(*phases, training), disk=tuple(disk))


def distill_phase(config: DistillConfig, work: Training, hardware: Hardware, *, num_steps: int = 1) -> Phase:
    """Return what the training takes: beside a teacher that is asked in every step, now and then, or not any more."""
    alone = replace(work, teacher=None)
    if not config.asks_while_training:
        return alone.phase(hardware, num_steps=num_steps)
    found = work.phase(hardware, num_steps=num_steps)
    is_seldom_asked = config.is_stored and math.isfinite(found.seconds)
    return replace(found, seconds=alone.seconds(hardware)) if is_seldom_asked else found


def distill_work(
    config: DistillConfig, shapes: Shapes, student: Mapping[str, Any], hardware: Hardware, pixels: Pixels
) -> Training:
    """Return the training itself, on samples of a size, with the teacher asked in each step."""
    latents = latent_shape(shapes.vae, pixels)
    name = "gpu" if config.strategy in ("gpu0", "auto", "sharded") else config.strategy
    resident = 0 if config.teacher_resident == "auto" else int(config.teacher_resident)
    placing = Placing(name=name, resident=resident, eight_bit=config.teacher_dtype == "float8")
    return Training(
        student=Use(
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
        ),
        optimiser=OptimiserChoice(config.optimizer_name),
        averages=config.use_ema,
        accumulation=config.gradient_accumulation,
        parallel=config.parallel,
        shard_size=config.shard_size,
        teacher=Use(
            name="teacher",
            config=shapes.transformers[0],
            latent_shape=latents,
            batch_size=config.rollout_batch if config.is_stored else config.batch_size,
            dtype=_teacher_dtype(config, hardware),
            is_streamed=placing.is_streamed,
        ),
        teacher_placing=placing,
        teacher_passes=2 if config.guidance_scale > 1 else 1,
    )


def encoding_phases(config: TransformerTrainingConfig, shapes: Shapes, hardware: Hardware) -> list[Phase]:
    """Return the phases in which captions and media are encoded, once for all."""
    dtype = DTYPES[config.dtype] if config.dtype != "auto" else torch.bfloat16 if hardware.card else torch.float32
    found = []
    encoder = shapes.text_encoder_model()
    if encoder is not None:
        found.append(text_phase(encoder, hardware, dtype))
    if config.dataset_path is not None:
        frames, height, width = planned_pixels(config, shapes.vae)
        found.append(encode_phase(shapes.vae, (3, frames, height, width), torch.float32, hardware))
    return found


def foreseen_precision(config: TrainingConfig, hardware: Hardware, weights: torch.dtype = torch.float32) -> MixedPrecision:
    """Return what is computed in 16 bits on such hardware."""
    return choose_precision(config, torch.device("cpu" if hardware.card is None else "cuda"), weights)


def _teacher_dtype(config: DistillConfig, hardware: Hardware) -> torch.dtype:
    if config.teacher_dtype in ("auto", "float8"):
        return torch.bfloat16 if hardware.card is not None else torch.float32
    return DTYPES[config.teacher_dtype]


def _state_bytes(count: int, config: TransformerTrainingConfig) -> Bytes:
    """Return what the states that are kept take: weights, moments, average."""
    each = 12 + (4 if config.use_ema else 0)
    return Bytes(config.keep * each * count)
