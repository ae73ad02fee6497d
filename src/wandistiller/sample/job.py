"""A sampling that has been checked: every part found, every default resolved, no weight read yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from wandistiller.config.placement import parse_limits, parse_resident
from wandistiller.config.sample import PICTURE_SUFFIXES, SampleConfig
from wandistiller.data.media import read_picture
from wandistiller.distributed.ranks import rank_device, read_ranks
from wandistiller.errors import UsageError
from wandistiller.files import check_can_write
from wandistiller.flow.guidance import needs_unconditional
from wandistiller.flow.schedule import Schedule
from wandistiller.flow.solver import SOLVERS
from wandistiller.memory.rates import fastest_cpu_dtype
from wandistiller.models.channel_adapter import CONFIG_NAME, ChannelAdapter
from wandistiller.models.devices import find_device, find_dtype
from wandistiller.models.expert_pair import inspect_experts
from wandistiller.models.latents import check_channels, num_tokens
from wandistiller.models.lora import with_lora
from wandistiller.models.pipeline import Pipeline, find_pipeline
from wandistiller.models.shapes import Shapes, read_config
from wandistiller.models.sizes import SIZES, Size, usual_size
from wandistiller.models.stored import VAE, StoredModel, inspect_checkpoint
from wandistiller.models.student_facts import read_learnt_guidance, read_text_limit
from wandistiller.models.text import read_embeddings
from wandistiller.models.text_padding import TEXT_TOKENS, can_fold_padding
from wandistiller.sample.conditioning import ImageInputs, check_image, image_inputs
from wandistiller.sample.geometry import Geometry, check_geometry
from wandistiller.sample.sharing import check_prompts, check_ranks

_TELLING_FIELDS = ("num_attention_heads", "ffn_dim", "in_channels", "out_channels", "image_dim")
"""What tells the named sizes apart."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to draw, with which models, on which device."""

    config: SampleConfig
    device: torch.device
    dtype: torch.dtype
    pipeline: Pipeline | None
    transformers: Sequence[StoredModel]
    vae: StoredModel | None
    geometry: Geometry
    schedule: Schedule
    solver: str
    guidance: tuple[float, float]
    """Scale for the first and for the second expert."""
    boundary: float | None
    prompts: Sequence[str]
    image: ImageInputs
    fps: int
    numbers: Sequence[int]
    """Which of all prompts these are, where others draw the rest."""
    num_prompts: int
    """All of them."""
    adapter: ChannelAdapter | None = None
    """Between the transformer's latents and the VAE's, where they have other channels."""
    max_text_tokens: int = TEXT_TOKENS
    """How much of a prompt the transformer is given."""
    is_automatic: bool = False
    """Whether ``auto`` has chosen where the transformer is; the text encoder may have no room there."""

    @property
    def num_samples(self) -> int:
        """Samples of all prompts."""
        return self.num_prompts * self.config.batch_size

    def part(self, place: int, count: int) -> Job:
        """Return one of ``count`` jobs that draw the prompts between them."""
        return replace(self, prompts=self.prompts[place::count], numbers=self.numbers[place::count])

    @property
    def num_tokens(self) -> int:
        """Tokens of one sample in the transformer."""
        return num_tokens(self.transformers[0].config, self.geometry.latent_shape)

    @property
    def shapes(self) -> Shapes:
        """The parts without their weights."""
        first, geometry = self.transformers[0].config, self.geometry
        factors = {"scale_factor_spatial": geometry.spatial, "scale_factor_temporal": geometry.temporal}
        # Without a VAE latents are written as they are.
        vae = self.vae.config if self.vae is not None else {"z_dim": first["out_channels"], **factors}
        encoder = None
        if self.config.cond is None and self.pipeline is not None:
            encoder = read_config(self.pipeline.part("text_encoder"))
        configs = [each.config for each in self.transformers]
        stored = self.transformers[0].main_dtype()
        return Shapes(transformers=configs, vae=vae, text_encoder=encoder, size=usual_size(vae), stored_dtype=stored)

    @property
    def settled(self) -> SampleConfig:
        """The configuration with what it leaves open filled in, to predict by; ranks that draw together are taken as one."""
        geometry = self.geometry
        sizes: dict[str, Any] = {"width": geometry.width, "height": geometry.height, "frames": geometry.frames}
        dtypes: dict[str, Any] = {
            name: str(dtype).removeprefix("torch.") for name, dtype in (("dtype", self.dtype), ("vae_dtype", self.vae_dtype))
        }
        return replace(self.config, **sizes, **dtypes, cfg_scale=self.guidance[0], context_parallel=1)

    @property
    def resident(self) -> int | Literal["auto"]:
        return parse_resident(self.config.resident, "--resident")

    @property
    def max_memory(self) -> dict[int | str, int] | None:
        """The most that a spread model may take of each card and of the host; what is free of those that are not named."""
        limits = parse_limits(self.config.max_memory, "--max-memory")
        if limits is None:
            return None
        from wandistiller.memory.spread import with_the_rest  # only here: it takes accelerate along

        return with_the_rest(limits)

    @property
    def vae_dtype(self) -> torch.dtype:
        return self.dtype if self.config.vae_dtype == "auto" else find_dtype(self.config.vae_dtype, self.device)

    @property
    def folds_padding(self) -> bool:
        """Whether texts go without their padding: the same result, and for pictures a fraction of the work."""
        config = self.transformers[0].config
        return can_fold_padding(config, num_tokens(config, self.geometry.latent_shape))

    @property
    def needs_negative(self) -> bool:
        return any(needs_unconditional(scale) for scale in self.guidance[: len(self.transformers)])

    def settings(self, prompt: str, seed: int) -> dict[str, Any]:
        """Return what is written into a sample's file, for whoever wants to know how it was drawn."""
        loras = [each for each in (self.config.lora, self.config.lora_2) if each is not None]
        return {
            "model": self.config.model or str(self.config.checkpoint),
            **({"loras": [str(each) for each in loras], "lora_scale": self.config.lora_scale} if loras else {}),
            "dtype": str(self.dtype).removeprefix("torch."),
            "boundary": self.boundary,
            "prompt": prompt,
            "negative_prompt": self.config.negative_prompt,
            "seed": seed,
            "steps": self.schedule.num_steps,
            "solver": self.solver,
            "cfg_scale": list(self.guidance[: len(self.transformers)]),
            "sigma_shift": self.config.sigma_shift,
            "size": [self.geometry.width, self.geometry.height, self.geometry.frames],
        }


def prepare(config: SampleConfig) -> Job:
    """Find and check every part without reading weights."""
    config.check()
    for path in (config.output, config.latent_path):
        if path is not None:
            check_can_write(path)
    ranks = read_ranks()
    check_ranks(config, ranks)
    device = find_device(rank_device(config.device, ranks))
    pipeline = _find_pipeline(config)
    transformers = _find_transformers(config, pipeline)
    first = transformers[0].config
    size = _nearest_size(transformers)
    vae = _find_vae(config, pipeline)
    # A student is of no named size; it is drawn with as its teacher is, whose VAE it has.
    usual = size or usual_size(vae.config if vae else SIZES["wan2.1-1.3b"].vae)
    expand = (pipeline.expand_timesteps if pipeline else False) or bool(size and size.expand_timesteps)
    inputs = image_inputs(first, expand)
    check_image(config.image, inputs, first)
    if config.image is not None:
        _check_image_parts(config, inputs, pipeline, vae)
    adapter = _find_adapter(pipeline, first["out_channels"])
    if vae is not None:
        check_channels(vae.config, adapter.teacher_channels if adapter is not None else first["out_channels"])
    geometry = _find_geometry(config, usual, vae, pipeline, first)
    solver = pipeline.choose_solver(config.solver) if pipeline else "unipc" if config.solver == "auto" else config.solver
    shift = config.sigma_shift or (pipeline.shift if pipeline else None) or usual.shift
    prompts = _read_prompts(config, first["text_dim"])
    check_prompts(config, len(prompts), ranks)
    job = Job(
        config=replace(config, sigma_shift=shift),
        device=device,
        dtype=_find_dtype(config, device),
        pipeline=pipeline,
        transformers=transformers,
        vae=vae,
        geometry=geometry,
        schedule=SOLVERS[solver].schedule(config.steps, shift),
        solver=solver,
        guidance=_find_guidance(config, pipeline, usual, size),
        boundary=_find_boundary(config, pipeline, size, len(transformers)),
        prompts=prompts,
        numbers=range(len(prompts)),
        num_prompts=len(prompts),
        image=inputs,
        fps=config.fps or usual.fps,
        adapter=adapter,
        max_text_tokens=read_text_limit(pipeline.folder) if pipeline is not None and not config.checkpoint else TEXT_TOKENS,
    )
    _check_guidance(job)
    return job


def _find_pipeline(config: SampleConfig) -> Pipeline | None:
    """Return the pipeline that ``--model`` names, with a text encoder if prompts are to be encoded."""
    pipeline = find_pipeline(config.model, _parts(config)) if config.model else None
    if pipeline is not None and config.cond is None and "text_encoder" not in pipeline.parts:
        raise UsageError(
            f"{config.model} has no text encoder that can be read.",
            why="original Wan folders keep theirs in another form.",
            fix="Encode the prompt with a diffusers pipeline's text encoder and give the file as --cond; see docs/sample.md.",
        )
    return pipeline


def _find_guidance(config: SampleConfig, pipeline: Pipeline | None, usual: Size, size: Size | None) -> tuple[float, float]:
    """Return the scales of the two experts; the second's own is taken where the first's is. 1 for what has learnt guidance."""
    own = pipeline.folder if pipeline is not None and not config.checkpoint else None
    if config.cfg_scale is None and own is not None and read_learnt_guidance(own) is not None:
        return 1.0, 1.0
    scale = config.cfg_scale if config.cfg_scale is not None else usual.guidance
    if config.cfg_scale_2 is not None:
        return scale, config.cfg_scale_2
    return scale, size.guidance_2 if size and size.guidance_2 is not None and config.cfg_scale is None else scale


def _check_guidance(job: Job) -> None:
    config, num_experts = job.config, len(job.transformers)
    if config.cfg_scale_2 is not None and num_experts == 1:
        raise UsageError("--cfg-scale-2 is for models of two experts.", fix="Leave it away, or give --checkpoint-2.")
    if job.needs_negative and config.cond is not None and config.uncond is None:
        scales = " and ".join(f"{value:g}" for value in job.guidance[:num_experts])
        raise UsageError(
            f"Guidance of {scales} needs the embeddings of the negative prompt.",
            fix="Give them with --uncond, or switch guidance off with --cfg-scale 1 (and --cfg-scale-2 1).",
        )


def _check_image_parts(config: SampleConfig, inputs: ImageInputs, pipeline: Pipeline | None, vae: StoredModel | None) -> None:
    """Raise ``UsageError`` or ``MediaError`` where a first frame could not be encoded."""
    assert config.image is not None
    read_picture(config.image)
    if vae is None:
        raise UsageError("--image needs a VAE to encode it.", fix="Give one with --vae-checkpoint, or a whole --model.")
    missing = [part for part in ("image_encoder", "image_processor") if pipeline is None or part not in pipeline.parts]
    if inputs.wants_image_tokens and missing:
        raise UsageError(
            "This checkpoint also looks at the picture through CLIP, and there is no image encoder.",
            fix="Give the whole pipeline with --model; single files have none.",
        )


def describe(job: Job) -> str:
    """Say in a few lines what is about to be done."""
    is_picture = job.geometry.frames == 1
    what = f"{job.num_samples} {'picture' if is_picture else 'clip'}{'s' if job.num_samples > 1 else ''}"
    length = "" if is_picture else f", {job.geometry.frames} frames"
    lines = [
        f"Drawing {what} of {job.geometry.width}x{job.geometry.height}{length}, "
        f"with {job.schedule.num_steps} steps of {job.solver}, shift {job.config.sigma_shift:g}, "
        f"guidance {' then '.join(f'{scale:g}' for scale in job.guidance[: len(job.transformers)])}, "
        f"on {job.device} in {str(job.dtype).removeprefix('torch.')}"
    ]
    kept = job.transformers[0].kept_in_float32()
    if job.dtype != torch.float32:
        lines.append(f"{len(kept)} tensors stay in float32, as Wan keeps them: norms, modulation, time embedding")
    if job.config.placement_name == "offload" and job.device.type == "cpu":
        lines.append("--placement offload changes nothing here: the CPU computes, so the weights are in its memory anyway")
    size = job.config.context_parallel
    if size > 1:
        lines.append(f"{size} ranks compute each together, {-(-job.num_tokens // size)} of {job.num_tokens} tokens on each")
    return "\n".join(lines)


def _find_dtype(config: SampleConfig, device: torch.device) -> torch.dtype:
    if config.placement_name == "cpu" and config.dtype == "auto":
        return fastest_cpu_dtype()
    return find_dtype(config.dtype, device)


def _parts(config: SampleConfig) -> set[str]:
    parts = {"transformer_2"} if config.checkpoint else {"transformer", "transformer_2"}
    if (config.wants_pixels or config.image) and not config.vae_checkpoint:
        parts.add("vae")
    if config.cond is None:
        parts |= {"text_encoder", "tokenizer"}
    if config.image is not None:
        parts |= {"image_encoder", "image_processor"}
    return parts


def _find_adapter(pipeline: Pipeline | None, channels: int) -> ChannelAdapter | None:
    """Return what a distilled student's latents go through on their way to the VAE, where it has other channels."""
    if pipeline is None or not (pipeline.folder / CONFIG_NAME).is_file():
        return None
    adapter = ChannelAdapter.load(pipeline.folder)
    return adapter if adapter.student_channels == channels else None


def _find_transformers(config: SampleConfig, pipeline: Pipeline | None) -> list[StoredModel]:
    paths = [config.checkpoint] if config.checkpoint else [pipeline.part("transformer")] if pipeline else []
    if config.checkpoint_2 is not None:
        paths.append(config.checkpoint_2)
    elif pipeline is not None and "transformer_2" in pipeline.parts:
        paths.append(pipeline.part("transformer_2"))
    found = inspect_experts(paths)
    loras = [config.lora, config.lora_2]
    if config.lora_2 is not None and len(found) == 1:
        raise UsageError("--lora-2 is for models of two experts.", fix="Give it with --lora.")
    return [
        stored if lora is None else with_lora(stored, lora, config.lora_scale)
        for stored, lora in zip(found, loras, strict=False)
    ]


def _find_boundary(config: SampleConfig, pipeline: Pipeline | None, size: Size | None, num_experts: int) -> float | None:
    if num_experts == 1:
        if config.boundary is not None:
            raise UsageError("--boundary is for models of two experts.", fix="Give the second with --checkpoint-2.")
        return None
    usual = (size.boundary if size else None) or SIZES["wan2.2-a14b"].boundary
    if config.boundary is not None or pipeline is None or "transformer_2" not in pipeline.parts:
        return config.boundary or (pipeline.boundary if pipeline else None) or usual
    return pipeline.find_boundary(usual)


def _find_vae(config: SampleConfig, pipeline: Pipeline | None) -> StoredModel | None:
    if config.vae_checkpoint is not None:
        return inspect_checkpoint(config.vae_checkpoint, VAE)
    if pipeline is not None and "vae" in pipeline.parts and (config.wants_pixels or config.image):
        return inspect_checkpoint(pipeline.part("vae"), VAE)
    if config.wants_pixels:
        raise UsageError(
            "There is no VAE to turn latents into pixels.",
            fix="Give one with --vae-checkpoint, or write latents: --output NAME.safetensors.",
        )
    return None


def _find_geometry(
    config: SampleConfig,
    usual: Size,
    vae: StoredModel | None,
    pipeline: Pipeline | None,
    transformer: Mapping[str, Any],
) -> Geometry:
    is_picture = config.output.suffix.lower() in PICTURE_SUFFIXES
    frames = config.frames or (1 if is_picture else usual.frames)
    known = vae.config if vae else usual.vae
    factors = known["scale_factor_spatial"], known["scale_factor_temporal"]
    if vae is None and pipeline is not None:  # latents alone are asked for; they have the shape that the VAE would want
        factors = pipeline.vae_factors() or factors
    return check_geometry(
        config.width or usual.width, config.height or usual.height, frames, *factors, transformer_config=transformer
    )


def _nearest_size(stored: Sequence[StoredModel]) -> Size | None:
    """Return the named size that these transformers are of, by their shape."""
    config = stored[0].config
    for size in SIZES.values():
        same = all(config[name] == size.transformer[name] for name in _TELLING_FIELDS)
        if same and (size.boundary is not None) == (len(stored) == 2):
            return size
    return None


def _read_prompts(config: SampleConfig, text_dim: int) -> list[str]:
    """Return the prompts, or for a file of embeddings one nameless prompt a row."""
    if config.cond is not None:
        if config.uncond is not None and read_embeddings(config.uncond, text_dim).shape[0] != 1:
            raise UsageError(f"--uncond {config.uncond} holds several embeddings.", fix="Give one, for all prompts.")
        return [f"{config.cond.stem}"] * read_embeddings(config.cond, text_dim).shape[0]
    if config.prompt_file is None:
        return list(config.prompt)
    try:
        lines = config.prompt_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--prompt-file {config.prompt_file} cannot be read.", why=str(error), fix="Give a UTF-8 text file."
        ) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"--prompt-file {config.prompt_file} has no prompts.", fix="Write one prompt a line.")
    return prompts
