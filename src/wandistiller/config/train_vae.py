"""``wandistiller train-vae``: train or fine-tune a Wan VAE on pictures and clips."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from wandistiller.config.training import PrecisionName, TrainingConfig, check_idle, check_least
from wandistiller.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrainVaeConfig(TrainingConfig):
    """Train a Wan VAE with reconstruction, KL, LPIPS and a critic; the result is a diffusers AutoencoderKLWan folder.

    The statistics of its latents are measured at the end and written into its configuration, so that flow training
    normalises with them.
    """

    command: ClassVar[str] = "train-vae"

    model: str | None = None
    """VAE to start from: a diffusers folder or hub id of a pipeline or VAE, a file in any dialect, or 'tiny'."""

    from_scratch: bool = False
    """Start from random weights in the shape of --model."""

    dataset_path: str | None = None
    """Folder of pictures and clips, which need no captions here; or a list file; or a .jsonl file; or the procedural world, as
    world:COUNT:FRAMESxHEIGHTxWIDTH (1+9x64x64 is pictures and clips in turn)."""

    held_out: str | None = None
    """Data that quality is measured on, in the same forms as --dataset-path."""

    skip_bad: bool = False
    """Go on without media that cannot be read, and list them."""

    width: int | None = None
    """Width in pixels, with --height. Default: what models with such a VAE are usually sampled at."""

    height: int | None = None
    """Height in pixels, with --width."""

    frames: tuple[int, ...] = ()
    """Frames of clips, each one more than a multiple of 4; pictures always have 1. Default: what models with such a VAE are
    usually sampled at, for Wan 81 or 121; a few are enough."""

    max_aspect: float = 2.0
    """Most elongated of the sizes that media are sorted into; 1 crops everything to exactly --width x --height."""

    mirror: bool = False
    """Mirror half of the media, left to right."""

    reduced_min_sizes: tuple[int, ...] = ()
    """Train each batch also at these smaller sizes, given by the shorter side and rounded to what the VAE can take; they share
    its step."""

    training_steps: int = 1
    """Updates with each batch; they count as one step."""

    output_dir: Path = Path("runs/train-vae")
    """Folder of the run: states to resume from, reconstructions, metrics.jsonl, TensorBoard files, and the VAE at the end."""

    batch_size: int = 4
    """Samples computed together on each device."""

    learning_rate: float = 1e-4
    """Step size after the warm-up: 5e-5 is usual for a trained VAE, 1e-3 for a small one from scratch."""

    critic_learning_rate: float | None = None
    """Step size of the critic. Default: the VAE's."""

    weight_decay: float = 0.0
    """Decoupled weight decay."""

    lambda_rec: float = 1.0
    """Weight of the reconstruction, the mean absolute error of pixels; 0 leaves closeness to LPIPS."""

    high_frequency_weight: float = 0.0
    """Extra weight of fine detail in the reconstruction loss; 0 is plain L1."""

    kl_beta: float = 1e-6
    """Weight of the KL divergence after its warm-up."""

    kl_warmup_steps: int = 0
    """Global steps over which the weight of the KL rises from 0, along a cosine."""

    kl_free_bits: float = 0.0
    """KL of each latent channel, in nats a number, that costs nothing."""

    use_lpips: bool = False
    """Add the LPIPS distance; its weights are fetched and converted once, see wandistiller lpips --help."""

    lambda_lpips: float = 1.0
    """Weight of the LPIPS distance beside the reconstruction."""

    lpips_checkpointing: bool = False
    """Recompute LPIPS's network in backward: slower, less memory."""

    gan_training: bool = False
    """Train a critic against the VAE."""

    lambda_adv: float = 0.5
    """Weight of the critic's word, beside its adaptive scale."""

    gan_start: int = 0
    """Step from which the VAE listens to the critic."""

    r1_gamma: float = 5.0
    """Weight of the critic's gradient penalty on real samples; 0 for none."""

    r1_interval: int = 16
    """Steps between penalties; each is scaled up by it."""

    critic_width: int = 64
    """Channels of the critic's first layer."""

    vae_gradient_checkpointing: bool = False
    """Recompute the VAE's layers in backward: slower, much less memory."""

    channels_last: bool = False
    """Lay pictures out channels last: faster convolutions on some GPUs."""

    torch_compile: bool = False
    """Compile encoder and decoder: slow first steps, then faster."""

    use_fp16: bool = False
    """The same as --mixed-precision fp16."""

    validate_every: int = 500
    """Steps between looks at the held-out data, with pictures side by side; 0 for none before the end."""

    statistics_samples: int = 512
    """Samples that the statistics of the latents are measured on at the end."""

    def check(self) -> None:
        super().check()
        if self.model is None or self.dataset_path is None:
            missing = "--model" if self.model is None else "--dataset-path"
            raise UsageError(f"{missing} is missing.", fix="Say what to train with --model, and on what with --dataset-path.")
        if (self.width is None) != (self.height is None):
            raise UsageError("--width and --height go together.", fix="Give both, or neither.")
        if self.use_fp16 and self.mixed_precision not in ("auto", "fp16"):
            raise UsageError(f"--use-fp16 and --mixed-precision {self.mixed_precision} were both given.", fix="Choose one.")
        if self.is_sharded and self.channels_last:
            raise UsageError(
                f"--channels-last does not go with --parallel {self.parallel}.",
                why="weights are cut along their first dimension, which has to be the outermost in memory.",
                fix="Leave one of them away.",
            )
        check_least(
            ("--max-aspect", self.max_aspect, 1),
            ("--training-steps", self.training_steps, 1),
            ("--critic-learning-rate", self.critic_learning_rate, 0),
            ("--kl-beta", self.kl_beta, 0),
            ("--kl-warmup-steps", self.kl_warmup_steps, 0),
            ("--kl-free-bits", self.kl_free_bits, 0),
            ("--lambda-rec", self.lambda_rec, 0),
            ("--lambda-lpips", self.lambda_lpips, 0),
            ("--lambda-adv", self.lambda_adv, 0),
            ("--gan-start", self.gan_start, 0),
            ("--r1-gamma", self.r1_gamma, 0),
            ("--r1-interval", self.r1_interval, 1),
            ("--critic-width", self.critic_width, 1),
            ("--high-frequency-weight", self.high_frequency_weight, 0),
            ("--statistics-samples", self.statistics_samples, 2),
        )
        if not self.use_lpips:
            check_idle(self, "--use-lpips", "lambda_lpips", "lpips_checkpointing")
        if not self.lambda_rec:
            check_idle(self, "--lambda-rec", "high_frequency_weight")
            nothing = "nothing would ask the VAE for what it was given."
            if not self.use_lpips:
                advice = "Add --use-lpips, or give another weight."
                raise UsageError("--lambda-rec 0 was given without LPIPS.", why=nothing, fix=advice)
            if not self.lambda_lpips:
                advice = "Give one of them a weight, such as --lambda-rec 1."
                raise UsageError("--lambda-rec 0 and --lambda-lpips 0 were both given.", why=nothing, fix=advice)
        if not self.gan_training:
            critic = ("lambda_adv", "gan_start", "r1_gamma", "r1_interval", "critic_width", "critic_learning_rate")
            check_idle(self, "--gan-training", *critic)
        elif not self.r1_gamma:
            check_idle(self, "--r1-gamma 5 or the like", "r1_interval")
        if not self.kl_beta:
            check_idle(self, "--kl-beta 1e-6 or the like", "kl_warmup_steps", "kl_free_bits")
        if self.held_out is None and self.validate_every:
            check_idle(self, "--held-out", "validate_every")

    @property
    def precision_name(self) -> PrecisionName:
        return "fp16" if self.use_fp16 else self.mixed_precision
