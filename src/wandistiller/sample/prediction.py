"""What a sampling will take, from its configuration and the models' shapes: no weights, no card."""

from __future__ import annotations

from dataclasses import replace

import torch

from wandistiller.config.sample import PICTURE_SUFFIXES, SampleConfig
from wandistiller.errors import UsageError
from wandistiller.memory.encoder_phases import Decoding, text_phase
from wandistiller.memory.estimates import Estimate, Phase
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Passes, foreseen_placing
from wandistiller.models.devices import DTYPES
from wandistiller.models.latents import latent_shape
from wandistiller.models.shapes import Shapes


def predict_sample(config: SampleConfig, shapes: Shapes, hardware: Hardware) -> Estimate:
    """Return what ``sample`` takes."""
    if config.context_parallel > 1:
        raise UsageError(
            "There is no plan yet for ranks that compute a clip together.",
            fix="Leave --context-parallel away: weights take the same, and what a pass computes with is divided by the ranks.",
        )
    dtype = _dtype(config.dtype, hardware)
    size = shapes.size
    is_picture = config.output.suffix.lower() in PICTURE_SUFFIXES
    frames = config.frames or (1 if is_picture else size.frames)
    latents = latent_shape(shapes.vae, (frames, config.height or size.height, config.width or size.width))
    placing = _placing(config)
    phases: list[Phase] = []
    encoder = shapes.text_encoder_model() if config.cond is None else None
    if encoder is not None:
        streams = {"gpu": False, "offload": True, "disk": True}.get(config.placement_name)
        phases.append(text_phase(encoder, hardware, dtype, is_streamed=streams))
    scale = config.cfg_scale if config.cfg_scale is not None else size.guidance
    phases.append(_denoising(config, shapes, latents, dtype, placing, hardware, passes=1 if scale == 1 else 2))
    if config.wants_pixels:
        vae_dtype = dtype if config.vae_dtype == "auto" else DTYPES[config.vae_dtype]
        decoding = Decoding(config=shapes.vae, latent_shape=latents, dtype=vae_dtype, is_tiled=config.vae_tiling)
        phases.append(decoding.phase(hardware))
    return Estimate(phases=tuple(phases))


def _placing(config: SampleConfig) -> Placing:
    """Return where the transformer lives; ``auto`` is the card until it has been chosen."""
    name = "gpu" if config.placement_name == "auto" else config.placement_name
    return Placing(
        name=name,
        resident=0 if config.resident == "auto" or name != "offload" else int(config.resident),
        eight_bit=config.eight_bit,
        device_map=config.device_map,
        max_memory=config.max_memory,
    )


def _denoising(
    config: SampleConfig,
    shapes: Shapes,
    latents: tuple[int, int, int, int],
    dtype: torch.dtype,
    placing: Placing,
    hardware: Hardware,
    passes: int,
) -> Phase:
    transformer = shapes.transformers[0]
    use = Use(
        name="transformer",
        config=transformer,
        latent_shape=(transformer["in_channels"], *latents[1:]),
        batch_size=config.batch_size,
        dtype=dtype,
    )
    # The solver holds noise, latents and a few velocities, in float32.
    held = (4 * config.batch_size * torch.Size(latents).numel(),) * 6
    work = Passes(use=use, placing=placing, passes=passes, held=held)
    found = work.phase(hardware, name="denoising", num_steps=config.steps)
    if config.placement_name != "auto":
        return found
    chosen = foreseen_placing(use, found, hardware)
    return replace(work, placing=chosen).phase(hardware, name="denoising", num_steps=config.steps)


def _dtype(name: str, hardware: Hardware) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if hardware.card is not None else torch.float32
