"""``wandistiller sample``: from a checkpoint and a prompt to a picture or a clip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from wandistiller.config.command import CommandConfig, DtypeName, SolverName
from wandistiller.config.placement import PlacementName, parse_limits, parse_resident
from wandistiller.errors import UsageError

PICTURE_SUFFIXES = (".png",)
CLIP_SUFFIXES = (".mp4",)
LATENT_SUFFIXES = (".safetensors",)


@dataclass(frozen=True, kw_only=True)
class SampleConfig(CommandConfig):
    """Generate pictures (PNG), clips (MP4) or latents from a Wan checkpoint.

    Give a pipeline with --model and say what to draw with --prompt; or give single files with --checkpoint,
    --vae-checkpoint and precomputed text embeddings with --cond and --uncond.
    """

    command: ClassVar[str] = "sample"
    """Name of the command that this is the configuration of."""

    model: str | None = None
    """Pipeline to sample from: a diffusers folder, a hub id (owner/name), a folder of original Wan files, or 'tiny', the
    one in the box, which draws captions of the procedural world. Only the parts that are needed are read."""

    prompt: tuple[str, ...] = ()
    """What to draw; several prompts give several outputs."""

    prompt_file: Path | None = None
    """Text file with one prompt a line, UTF-8; an alternative to --prompt."""

    negative_prompt: str = ""
    """What guidance pushes away from; leave it empty unless the model's card recommends one."""

    image: Path | None = None
    """First frame, for image-to-video checkpoints; it is resized to --width and --height."""

    checkpoint: Path | None = None
    """Transformer weights: a safetensors file (diffusers, original or ComfyUI), a shard index or a folder. With --model it
    replaces the pipeline's transformer."""

    checkpoint_2: Path | None = None
    """Weights of the second, low-noise expert of a two-expert model (Wan 2.2 A14B)."""

    lora: Path | None = None
    """LoRA weights to add to the transformer, to the first of two experts: a file for diffusers or ComfyUI, or the lora/ folder
    of a training."""

    lora_2: Path | None = None
    """LoRA weights for the second, low-noise expert."""

    lora_scale: float = 1.0
    """How much of the LoRA is added."""

    vae_checkpoint: Path | None = None
    """VAE weights; with --model they replace the pipeline's VAE. Without any VAE only latents can be written."""

    cond: Path | None = None
    """Safetensors file with the text embeddings to draw (key 'embeddings'); no text encoder is loaded then."""

    uncond: Path | None = None
    """Safetensors file with the embeddings of the negative (usually empty) prompt; needed when --cfg-scale is above 1."""

    output: Path = Path("sample.png")
    """File to write: .png for a picture, .mp4 for a clip, .safetensors for latents. Several outputs are numbered."""

    output_latent: Path | None = None
    """Also write the final latents here (safetensors, key 'latent'). The bare flag puts them beside --output."""

    steps: int = 40
    """Solver steps. 40 to 50 is what Wan is released with; fewer is faster and coarser."""

    cfg_scale: float | None = None
    """Guidance: 1 switches it off and halves the time, 3 to 6 follow the prompt more closely. Default: the model's own."""

    cfg_scale_2: float | None = None
    """Guidance for the low-noise expert; default: the model's own, or else --cfg-scale."""

    sigma_shift: float | None = None
    """Shift of the schedule towards noise; more for larger pictures (3 at 480p, 5 at 720p). Default: the model's own."""

    boundary: float | None = None
    """Sigma below which the second expert takes over. Default: the pipeline's own, or 0.875."""

    solver: SolverName = "auto"
    """How to follow the flow. 'auto' takes the pipeline's own; unipc needs fewer steps than euler."""

    width: int | None = None
    """Width in pixels. Default: what the model is usually sampled at."""

    height: int | None = None
    """Height in pixels. Default: what the model is usually sampled at."""

    frames: int | None = None
    """Frames, one more than a multiple of 4. Default: 1 for a .png, the model's own for an .mp4."""

    fps: int | None = None
    """Frames a second in the written clip. Default: the model's own, 16 or 24."""

    seed: int = 0
    """Seed of the first sample; others count up from it. The same seed gives the same bytes on the same device."""

    batch_size: int = 1
    """Samples of each prompt, computed together; lower it when memory runs out."""

    dtype: DtypeName = "auto"
    """Precision of the transformer. 'auto' is bfloat16 on a GPU and float32 on the CPU."""

    vae_dtype: DtypeName = "float32"
    """Precision of the VAE. float32 is safest; bfloat16 halves its memory at a small loss. 'auto' follows --dtype."""

    device: str = "auto"
    """Where to compute: cuda, cuda:1, mps or cpu. 'auto' takes the best there is."""

    placement: PlacementName = "auto"
    """Where the transformer's weights live. 'gpu': on the card. 'offload': in host memory, blocks streamed to the card ahead
    of their use; the model never touches the card as a whole. 'disk': the same from its files. 'cpu': the CPU computes.
    'balanced', 'sequential': spread over several GPUs. 'custom': as --device-map says. 'auto': the fastest that fits."""

    offload_to_cpu: bool = False
    """The same as --placement offload."""

    resident: str = "auto"
    """With --placement offload: how many blocks stay on the card. 'auto' finds how many the bus needs to keep up, as far as
    there is room; 0 takes the least memory."""

    eight_bit: bool = False
    """With --placement offload: keep the blocks in 8 bits, which halves what crosses the bus and needs half the host memory,
    at a small error, which is told."""

    device_map: Path | None = None
    """With --placement custom: JSON or TOML file that names a GPU's number, cpu or disk for each module."""

    max_memory: tuple[str, ...] = ()
    """With --placement balanced or sequential: most to use of each GPU in their order, and of the host, such as
    20GiB 20GiB cpu=64GiB. Default: what is free."""

    context_parallel: int = 1
    """Under torchrun: how many ranks compute one clip together, each with a share of its tokens, so that longer clips fit and
    each is drawn sooner. Groups of so many ranks share the prompts. 1: each rank draws prompts of its own."""

    vae_tiling: bool = False
    """Decode in tiles, and encode --image in them: take it when memory runs out in the VAE. There are no seams: pixels are
    those of the whole frame to rounding, 1e-5 in float32. Frames of up to 24x24 latents are not cut. Decoding takes about
    half as long again."""

    def check(self) -> None:
        super().check()
        self._check_placement()
        self._check_sources()
        self._check_numbers()
        self._check_outputs()

    @property
    def placement_name(self) -> PlacementName:
        """The placement, by whichever flag it was asked for."""
        return "offload" if self.offload_to_cpu else self.placement

    def _check_placement(self) -> None:
        if self.offload_to_cpu and self.placement not in ("auto", "offload"):
            raise UsageError(f"--offload-to-cpu and --placement {self.placement} were both given.", fix="Choose one of them.")
        if (self.device_map is None) == (self.placement == "custom"):
            raise UsageError(
                "--placement custom and --device-map go together.",
                fix="Give both, or choose another placement.",
            )
        if self.device_map is not None and not self.device_map.is_file():
            raise UsageError(f"--device-map {self.device_map} does not exist.", fix="Check the path.")
        if self.eight_bit and self.placement_name != "offload":
            raise UsageError("--eight-bit goes with --placement offload.", fix="Give both.")
        if self.max_memory and self.placement not in ("balanced", "sequential"):
            raise UsageError("--max-memory goes with --placement balanced or sequential.", fix="Choose one of these.")
        if parse_resident(self.resident, "--resident") != "auto" and self.placement_name not in ("offload", "auto"):
            raise UsageError("--resident goes with --placement offload.", fix="Give both, or leave --resident away.")
        parse_limits(self.max_memory, "--max-memory")

    def _check_sources(self) -> None:
        if not self.model and self.checkpoint is None:
            raise UsageError(
                "There is nothing to sample from.",
                fix="Give a pipeline with --model (try --model tiny) or a file of weights with --checkpoint.",
            )
        if self.lora_scale != 1 and self.lora is None and self.lora_2 is None:
            raise UsageError("--lora-scale changes nothing without a LoRA.", fix="Give one with --lora, or leave it away.")
        given = [flag for flag, value in self._texts() if value]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} were both given.", fix="Choose one way to say what to draw.")
        if not given:
            raise UsageError(
                "There is nothing to draw.", fix="Give --prompt, --prompt-file or, with embeddings made before, --cond."
            )
        if self.model is None and self.cond is None:
            raise UsageError(
                f"{given[0]} needs a text encoder, and a single file has none.",
                fix="Give the pipeline with --model, or text embeddings with --cond.",
            )
        if self.uncond is not None and self.cond is None:
            raise UsageError(
                "--uncond goes with --cond.", fix="With a text encoder, give the negative prompt as --negative-prompt."
            )
        if self.checkpoint_2 is not None and self.checkpoint is None and self.model is None:
            raise UsageError("--checkpoint-2 is a second expert without a first.", fix="Give the first with --checkpoint.")

    def _texts(self) -> list[tuple[str, object]]:
        return [("--prompt", self.prompt), ("--prompt-file", self.prompt_file), ("--cond", self.cond)]

    def _check_numbers(self) -> None:
        for flag, value, least in (
            ("--steps", self.steps, 1),
            ("--batch-size", self.batch_size, 1),
            ("--context-parallel", self.context_parallel, 1),
            ("--width", self.width, 1),
            ("--height", self.height, 1),
            ("--frames", self.frames, 1),
            ("--fps", self.fps, 1),
            ("--cfg-scale", self.cfg_scale, 0),
            ("--cfg-scale-2", self.cfg_scale_2, 0),
        ):
            if value is not None and value < least:
                raise UsageError(f"{flag} {value} is too small.", fix=f"Give {least} or more.")
        if self.sigma_shift is not None and not 0 < self.sigma_shift <= 1000:
            raise UsageError(f"--sigma-shift {self.sigma_shift} is not between 0 and 1000.", fix="3 to 12 are usual for Wan.")
        if self.boundary is not None and not 0 < self.boundary < 1:
            raise UsageError(f"--boundary {self.boundary} is not between 0 and 1.", fix="Wan 2.2 uses 0.875 or 0.9.")

    def _check_outputs(self) -> None:
        known = PICTURE_SUFFIXES + CLIP_SUFFIXES + LATENT_SUFFIXES
        if self.output.suffix.lower() not in known:
            raise UsageError(f"--output {self.output} has an unknown ending.", fix=f"End it with one of {', '.join(known)}.")
        for path in (self.output, self.latent_path):
            if path is not None and path.is_dir():
                raise UsageError(f"{path} is a folder.", fix="Name a file in it.")
        if self.frames is not None and self.frames > 1 and self.output.suffix.lower() in PICTURE_SUFFIXES:
            raise UsageError(f"{self.frames} frames do not go into {self.output}.", fix="End --output with .mp4.")
        latents = self.latent_path
        if latents is not None and latents.suffix.lower() not in LATENT_SUFFIXES:
            raise UsageError(f"--output-latent {latents} must end with .safetensors.", fix="Rename it.")
        if latents == self.output:
            raise UsageError(f"{latents} was given as --output and as --output-latent.", fix="Leave --output-latent away.")

    @property
    def wants_pixels(self) -> bool:
        """Whether a VAE is needed at the end."""
        return self.output.suffix.lower() not in LATENT_SUFFIXES

    @property
    def latent_path(self) -> Path | None:
        """Where latents go besides the output; the bare flag puts them beside it under its name."""
        if self.output_latent == Path("auto"):
            return self.output.with_suffix(".safetensors")
        return self.output_latent
