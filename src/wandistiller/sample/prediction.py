"""What a sampling will take, from its configuration and the models' shapes: no weights, no card."""

from __future__ import annotations

from dataclasses import replace

import torch

from wandistiller.config.placement import parse_limits
from wandistiller.config.sample import PICTURE_SUFFIXES, SampleConfig
from wandistiller.errors import UsageError
from wandistiller.memory.encoder_phases import CLIP_TOKENS, Decoding, Encoding, clip_phase, text_phase
from wandistiller.memory.estimates import Estimate, Phase, Samples
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Passes, foreseen_placing
from wandistiller.models.devices import DTYPES
from wandistiller.models.latents import latent_shape
from wandistiller.models.shapes import Shapes
from wandistiller.models.text_padding import TEXT_TOKENS
from wandistiller.sample.geometry import check_geometry

_TEXT_PLACES = {"gpu": "gpu", "offload": "offload", "disk": "offload", "cpu": "cpu"}
"""Where the text encoder is by where the transformer is; elsewhere it is where there is room."""


def predict_sample(
    config: SampleConfig, shapes: Shapes, hardware: Hardware, *, num_prompts: int | None = None, is_automatic: bool = False
) -> Estimate:
    """Return what ``sample`` takes; ``is_automatic`` says that where the transformer is was left to the program.

    ``num_prompts`` is how many there are, if they are not in the configuration.
    """
    if config.context_parallel > 1:
        raise UsageError(
            "There is no plan yet for ranks that compute a clip together.",
            fix="Leave --context-parallel away: weights take the same, and what a pass computes with is divided by the ranks.",
        )
    frames, height, width = _pixels(config, shapes)
    factors = shapes.vae["scale_factor_spatial"], shapes.vae["scale_factor_temporal"]
    check_geometry(width, height, frames, *factors, transformer_config=shapes.transformers[0])
    phases: list[Phase] = []
    encoder = shapes.text_encoder_model() if config.cond is None else None
    if encoder is not None:
        placing = text_placing(config, is_automatic=is_automatic) if hardware.card is not None else "gpu"
        phases.append(text_phase(encoder, hardware, _dtype(config.dtype, hardware), placing=placing))
    if config.image is not None:
        phases += _picture_phases(config, shapes, hardware)
    phases.append(_denoising(config, denoising_work(config, shapes, hardware, num_prompts=num_prompts), hardware))
    if config.wants_pixels:
        latents = latent_shape(shapes.vae, _pixels(config, shapes))
        dtype = _vae_dtype(config, hardware)
        decoding = Decoding(config=shapes.vae, latent_shape=latents, dtype=dtype, is_tiled=config.vae_tiling)
        phases.append(decoding.phase(hardware))
    samples = Samples(frames, height, width, batch_size=config.batch_size)
    return Estimate(phases=tuple(phases), samples=samples, is_once=True)


def text_placing(config: SampleConfig, *, is_automatic: bool) -> str | None:
    """Return where the text encoder is, beside a card; None for where there is room."""
    return None if is_automatic else _TEXT_PLACES.get(config.placement_name)


def _pixels(config: SampleConfig, shapes: Shapes) -> tuple[int, int, int]:
    """Return frames, height and width."""
    size = shapes.size
    is_picture = config.output.suffix.lower() in PICTURE_SUFFIXES
    return config.frames or (1 if is_picture else size.frames), config.height or size.height, config.width or size.width


def _picture_phases(config: SampleConfig, shapes: Shapes, hardware: Hardware) -> list[Phase]:
    """Return the phases in which the first frame is encoded: as a clip of which the rest is blank, or as a picture."""
    transformer = shapes.transformers[0]
    frames, height, width = _pixels(config, shapes)
    is_clip = transformer["in_channels"] != transformer["out_channels"]
    shape = (3, frames if is_clip else 1, height, width)
    media = Encoding(config=shapes.vae, pixel_shape=shape, dtype=_vae_dtype(config, hardware), is_tiled=config.vae_tiling)
    found = [media.phase(hardware, "encoding the picture")]
    return found if transformer.get("image_dim") is None else [*found, clip_phase(hardware)]


def _placing(config: SampleConfig) -> Placing:
    """Return where the transformer lives; ``auto`` is the card until it has been chosen."""
    name = "gpu" if config.placement_name == "auto" else config.placement_name
    return Placing(
        name=name,
        resident=0 if config.resident == "auto" or name != "offload" else int(config.resident),
        eight_bit=config.eight_bit,
        device_map=config.device_map,
        max_memory=parse_limits(config.max_memory, "--max-memory"),
    )


def denoising_work(config: SampleConfig, shapes: Shapes, hardware: Hardware, *, num_prompts: int | None = None) -> Passes:
    """Return what a solver does with the transformer; ``auto`` is the card until it has been chosen."""
    transformer, size = shapes.transformers[0], shapes.size
    latents = latent_shape(shapes.vae, _pixels(config, shapes))
    use = Use(
        name="transformer",
        config=transformer,
        latent_shape=(transformer["in_channels"], *latents[1:]),
        image_tokens=CLIP_TOKENS if config.image is not None and transformer.get("image_dim") is not None else 0,
        has_token_times=config.image is not None and transformer["in_channels"] == transformer["out_channels"],
        batch_size=config.batch_size,
        dtype=_dtype(config.dtype, hardware),
        stored_dtype=shapes.stored_dtype,
    )
    scale = config.cfg_scale if config.cfg_scale is not None else size.guidance
    # The solver holds noise, latents and a few velocities of all samples, in float32; texts are there for each sample, too.
    prompts = num_prompts or len(config.prompt) or 1
    sizes = [4 * prompts * config.batch_size * torch.Size(latents).numel()] * 6
    if prompts > 1:
        sizes.append(prompts * (1 + config.batch_size) * TEXT_TOKENS * transformer["text_dim"] * use.dtype.itemsize)
    return Passes(use=use, placing=_placing(config), passes=1 if scale == 1 else 2, held=tuple(sizes))


def _denoising(config: SampleConfig, work: Passes, hardware: Hardware) -> Phase:
    found = work.phase(hardware, name="denoising", num_steps=config.steps)
    if config.placement_name != "auto":
        return found
    chosen = foreseen_placing(work.use, found, hardware)
    return replace(work, placing=chosen).phase(hardware, name="denoising", num_steps=config.steps)


def _vae_dtype(config: SampleConfig, hardware: Hardware) -> torch.dtype:
    return _dtype(config.dtype if config.vae_dtype == "auto" else config.vae_dtype, hardware)


def _dtype(name: str, hardware: Hardware) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if hardware.card is not None else torch.float32
