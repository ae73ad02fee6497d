"""What trainings of a transformer have in common: data in caches, sigmas, an optimiser, activations, pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wandistiller.config.command import DtypeName, SolverName
from wandistiller.config.training import TrainingConfig, check_idle, check_least
from wandistiller.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TransformerTrainingConfig(TrainingConfig):
    """Base of the configuration of a training whose result is a transformer."""

    dataset_path: str | None = None
    """Folder of pictures and clips with NAME.txt beside each; or a list file (file TAB caption); or a .jsonl file; or the
    procedural world, as world:COUNT:FRAMESxHEIGHTxWIDTH (1+9x64x64 is pictures and clips in turn)."""

    held_out: str | None = None
    """Data for the held-out loss, in the same forms as --dataset-path. Without it no held-out loss is computed."""

    cache_dir: Path | None = None
    """Where the caches of embeddings and latents are. Default: the folder .cache in the data set's folder."""

    vae_checkpoint: Path | None = None
    """VAE weights in any dialect, in the place of the pipeline's VAE."""

    vae_dtype: DtypeName = "float32"
    """Precision of the VAE when media are encoded; give what `encode` was given, or they are encoded anew. 'auto' follows
    --dtype and takes what is in the cache already in any."""

    vae_tiling: bool = False
    """Encode large media in tiles: take it when memory runs out before the training has begun. Latents are the same to
    rounding; encoding them, once, takes up to twice as long."""

    skip_bad: bool = False
    """Go on without media that cannot be read, captions that are empty and the like, and list them."""

    width: int | None = None
    """Width in pixels, with --height. Default: what the model is usually sampled at."""

    height: int | None = None
    """Height in pixels, with --width. Default: what the model is usually sampled at."""

    frames: tuple[int, ...] = ()
    """Frames of clips, each one more than a multiple of 4; of several, a clip gets the largest that it can fill."""

    max_aspect: float = 2.0
    """Most elongated of the sizes that media are sorted into; 1 crops everything to exactly --width x --height."""

    optimizer: Literal["adamw", "adafactor", "adamw8bit"] = "adamw"
    """Optimiser. adafactor and adamw8bit keep a fraction of adamw's state."""

    use_8bit_adam: bool = False
    """The same as --optimizer adamw8bit."""

    beta1: float = 0.9
    """Memory of the gradient's average, from 0 to below 1."""

    beta2: float = 0.999
    """Memory of the gradient's square, from 0 to below 1; 0.95 forgets spikes sooner."""

    sigma_sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    """Which sigmas are trained how often, before the shift: logit_normal favours the middle."""

    sigma_mean: float = 0.0
    """Mean of the logit of sigma, for logit_normal."""

    sigma_std: float = 1.0
    """Standard deviation of the logit of sigma, for logit_normal."""

    sigma_shift: float | None = None
    """Shift towards noise, as in sampling. Default: the model's own."""

    activation_policy: Literal["none", "full", "selective"] = "none"
    """What backward recomputes: nothing, whole blocks, or all but attention."""

    gradient_checkpointing: bool = False
    """The same as --activation-policy full."""

    activations_to_host: bool = False
    """Send what is kept for backward to host memory, beside the computation."""

    judge_samples: int = 0
    """With --held-out of the procedural world: how many of its captions are drawn and judged, together with the held-out
    loss. The judge says what share of a caption's attributes is there."""

    sample_every: int = 0
    """Steps between sample pictures; 0 for none."""

    sample_dir: Path | None = None
    """Folder of the sample pictures. Default: samples in --output-dir."""

    sample_prompts: tuple[str, ...] = ()
    """Prompts of the samples, or a file with one a line; they are drawn as long and as large as the data are. Default: the
    first captions of the data, each in the size of its own picture or clip."""

    solver: SolverName = "auto"
    """How pictures, and the teacher's trajectories of distill, follow the flow. 'auto' takes the pipeline's own."""

    sample_steps: int = 20
    """Solver steps of each sample."""

    cfg_scale: float = 1.0
    """Guidance of the samples; 1 switches it off."""

    dtype: DtypeName = "auto"
    """Precision of the text encoder when captions are encoded."""

    @property
    def targets(self) -> tuple[Path, ...]:
        return *super().targets, *([] if self.sample_dir is None else [self.sample_dir / "x"])

    def check(self) -> None:
        super().check()
        if (self.width is None) != (self.height is None):
            raise UsageError("--width and --height go together.", fix="Give both, or neither.")
        if self.gradient_checkpointing and self.activation_policy == "selective":
            raise UsageError("--gradient-checkpointing is another policy than selective.", fix="Leave one of them away.")
        if self.use_8bit_adam and self.optimizer == "adafactor":
            raise UsageError("--use-8bit-adam and --optimizer adafactor were both given.", fix="Choose one.")
        if self.is_sharded and self.optimizer_name != "adamw":
            raise UsageError(
                f"--parallel {self.parallel} needs --optimizer adamw.",
                why=f"the state of {self.optimizer_name} cannot be cut along with the weights.",
                fix="Use --optimizer adamw, or --parallel ddp.",
            )
        if self.judge_samples and not (self.held_out or "").startswith("world"):
            raise UsageError("--judge-samples is for a held-out world.", fix="Add --held-out world-heldout:256:1x64x64.")
        check_least(
            ("--width", self.width, 1),
            ("--height", self.height, 1),
            *(("--frames", count, 1) for count in self.frames),
            ("--max-aspect", self.max_aspect, 1),
            ("--judge-samples", self.judge_samples, 0),
            ("--sample-every", self.sample_every, 0),
            ("--sample-steps", self.sample_steps, 1),
            ("--cfg-scale", self.cfg_scale, 0),
        )
        for flag, value in (("--beta1", self.beta1), ("--beta2", self.beta2)):
            if not 0 <= value < 1:
                raise UsageError(f"{flag} {value} is out of range.", fix="Give a number from 0 to below 1, such as 0.9.")
        for flag, logit, least, most, usual in (
            ("--sigma-mean", self.sigma_mean, -20, 20, "-1 to 1 are usual."),
            ("--sigma-std", self.sigma_std, 0.001, 10, "1 is usual."),
        ):
            if not least <= logit <= most:
                why = "it is of the logit of sigma, and nearly all sigmas would be the same."
                raise UsageError(f"{flag} {logit} is not between {least} and {most}.", why=why, fix=usual)
        if self.sigma_shift is not None and not 0 < self.sigma_shift <= 1000:
            raise UsageError(f"--sigma-shift {self.sigma_shift} is not between 0 and 1000.", fix="3 to 12 are usual for Wan.")
        if self.optimizer_name == "adafactor":
            check_idle(self, "--optimizer adamw", "beta1", "beta2")
        if self.sigma_sampling == "uniform":
            check_idle(self, "--sigma-sampling logit_normal", "sigma_mean", "sigma_std")
        if self.held_out is None and self.validate_every:
            check_idle(self, "--held-out", "validate_every")
        if not self.sample_every:
            check_idle(self, "--sample-every", "sample_dir", "sample_prompts")
        if not self.uses_solver:
            check_idle(self, "--sample-every", "solver")

    @property
    def optimizer_name(self) -> str:
        """The optimiser, by whichever flag it was asked for."""
        return "adamw8bit" if self.use_8bit_adam else self.optimizer

    @property
    def uses_solver(self) -> bool:
        """Whether anything is drawn."""
        return bool(self.sample_every or self.judge_samples)

    @property
    def policy(self) -> str:
        """The activation policy, by whichever flag it was asked for."""
        return "full" if self.gradient_checkpointing else self.activation_policy
