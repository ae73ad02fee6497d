"""What a training of a transformer will take, from its configuration and the models' shapes: no weights, no card."""

from __future__ import annotations

from typing import Any

import torch

from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.transformer_training import TransformerTrainingConfig
from wandistiller.memory.estimates import Estimate, Item, Passes, Phase, Placing, Training
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.other_uses import encode_phase, text_phase
from wandistiller.memory.uses import Adapters, Use
from wandistiller.models.devices import DTYPES
from wandistiller.models.latents import latent_shape
from wandistiller.models.shapes import Shapes
from wandistiller.models.student_config import read_student_config
from wandistiller.units import Bytes


def pixel_shape(config: TransformerTrainingConfig, shapes: Shapes) -> tuple[int, int, int]:
    """Return frames, height and width of the largest samples."""
    world = next((spec for spec in (config.dataset_path, getattr(config, "data_path", None)) if spec and _is_world(spec)), None)
    if world is not None:
        frames, height, width = world.split(":")[2].split("x")
        return max(map(int, frames.split("+"))), int(height), int(width)
    size = shapes.size
    return max(config.frames, default=size.frames), config.height or size.height, config.width or size.width


def predict_train(config: TrainConfig, shapes: Shapes, hardware: Hardware) -> Estimate:
    """Return what ``train`` takes."""
    transformer = shapes.transformers[-1 if config.expert == "low" else 0]
    latents = latent_shape(shapes.vae, pixel_shape(config, shapes))
    weights = DTYPES[config.weights_dtype]
    is_lora = config.lora_rank > 0
    student = Use(
        name="student",
        config=transformer,
        latent_shape=latents,
        batch_size=config.batch_size,
        dtype=weights,
        trains="adapters" if is_lora else "everything",
        adapters=Adapters(config.lora_rank, config.lora_targets) if is_lora else None,
        precision=precision_of(config, hardware, weights),
        policy=config.policy,
        to_host=config.activations_to_host,
        is_compiled=config.torch_compile,
    )
    work = Training(
        student=student,
        placing=Placing(name=config.placement, resident=0 if config.resident == "auto" else int(config.resident)),
        optimiser=OptimiserChoice(config.optimizer_name, config.rounding),
        averages=config.use_ema,
        accumulation=config.gradient_accumulation,
    )
    training = work.phase(hardware, num_steps=config.num_steps or 1000)
    count = sum(each.numel() for each in student.trained)
    disk = (Item("student", "states", "disk", _state_bytes(count, config)), Item("student", "result", "disk", Bytes(4 * count)))
    return Estimate(phases=(*encoding_phases(config, shapes, hardware), training), disk=disk)


def predict_distill(config: DistillConfig, shapes: Shapes, hardware: Hardware) -> Estimate:
    """Return what ``distill`` takes."""
    factors = {"spatial_factor": shapes.vae["scale_factor_spatial"], "temporal_factor": shapes.vae["scale_factor_temporal"]}
    plan = read_student_config(config.student_config, dict(shapes.transformers[0]), **factors)
    frames, height, width = pixel_shape(config, shapes)
    if config.width is None and plan.image_size is not None:
        height, width = plan.image_size
    if not config.frames and plan.num_frames is not None:
        frames = plan.num_frames
    latents = latent_shape(shapes.vae, (frames, height, width))
    student = Use(
        name="student",
        config=plan.config,
        latent_shape=(plan.config["in_channels"], *latents[1:]),
        batch_size=config.batch_size,
        dtype=torch.float32,
        trains="everything",
        precision=precision_of(config, hardware, torch.float32),
        policy=config.policy,
        to_host=config.activations_to_host,
        is_compiled=config.torch_compile,
    )
    name = "gpu" if config.strategy in ("gpu0", "auto") else config.strategy
    resident = 0 if config.teacher_resident == "auto" else int(config.teacher_resident)
    placing = Placing(name=name, resident=resident, eight_bit=config.teacher_dtype == "float8")
    teacher = Use(
        name="teacher",
        config=shapes.transformers[0],
        latent_shape=latents,
        batch_size=config.rollout_batch if config.noisy_source == "trajectories" else config.batch_size,
        dtype=_teacher_dtype(config, hardware),
        is_streamed=placing.is_streamed,
    )
    passes = 2 if config.guidance_scale > 1 else 1
    phases = [*encoding_phases(config, shapes, hardware)]
    if config.is_stored:
        asking = Passes(use=teacher, placing=placing, passes=passes)
        phases.append(asking.phase(hardware, name="asking the teacher", num_steps=config.rollout_steps))
    work = Training(
        student=student,
        optimiser=OptimiserChoice(config.optimizer_name),
        averages=config.use_ema,
        accumulation=config.gradient_accumulation,
        teacher=None if config.is_stored else teacher,
        teacher_placing=placing,
        teacher_passes=passes,
    )
    training = work.phase(hardware, num_steps=config.num_steps or 1000)
    count = plan.num_parameters()
    disk = [Item("student", "states", "disk", _state_bytes(count, config)), Item("student", "result", "disk", Bytes(4 * count))]
    if config.is_stored:
        records = (config.num_prompts or 1) * config.rollouts_per_prompt * config.rollout_steps
        disk.append(Item("teacher", "records", "disk", Bytes(8 * records * torch.Size(latents).numel())))
    return Estimate(phases=(*phases, training), disk=tuple(disk))


def encoding_phases(config: TransformerTrainingConfig, shapes: Shapes, hardware: Hardware) -> list[Phase]:
    """Return the phases in which captions and media are encoded, once for all."""
    dtype = DTYPES[config.dtype] if config.dtype != "auto" else torch.bfloat16 if hardware.card else torch.float32
    found = []
    encoder = shapes.text_encoder_model()
    if encoder is not None:
        found.append(text_phase(encoder, hardware, dtype))
    if config.dataset_path is not None:
        frames, height, width = pixel_shape(config, shapes)
        found.append(encode_phase(shapes.vae, (3, frames, height, width), torch.float32, hardware))
    return found


def precision_of(config: Any, hardware: Hardware, weights: torch.dtype) -> str:
    """Return what is computed in 16 bits on such hardware."""
    if config.mixed_precision != "auto":
        return str(config.mixed_precision)
    return "bf16" if hardware.card is not None and weights == torch.float32 else "no"


def _teacher_dtype(config: DistillConfig, hardware: Hardware) -> torch.dtype:
    if config.teacher_dtype in ("auto", "float8"):
        return torch.bfloat16 if hardware.card is not None else torch.float32
    return DTYPES[config.teacher_dtype]


def _state_bytes(count: int, config: TransformerTrainingConfig) -> Bytes:
    """Return what the states that are kept take: weights, moments, average."""
    each = 12 + (4 if config.use_ema else 0)
    return Bytes(config.keep * each * count)


def _is_world(spec: str) -> bool:
    return spec.startswith(("world:", "world-heldout:")) and spec.count(":") >= 2
