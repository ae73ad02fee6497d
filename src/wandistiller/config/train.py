"""``wandistiller train``: fine-tune Wan with flow matching on clips and captions, full or LoRA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wandistiller.config.command import CommandConfig, DtypeName
from wandistiller.config.placement import PlacementName, parse_resident
from wandistiller.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CommandConfig):
    """Train a Wan transformer with flow matching on a folder of pictures and clips with captions.

    Captions and media are encoded once into caches; then only the transformer is in memory. The result is a diffusers folder
    (or a LoRA file) that `sample` and diffusers load, in --output-dir.
    """

    model: str | None = None
    """Pipeline to start from: a diffusers folder, a hub id (owner/name), or 'tiny'. Its encoders prepare the data."""

    ckpt_path: Path | None = None
    """Transformer weights to start from, in any dialect, in the place of the pipeline's own."""

    from_scratch: bool = False
    """Start from random weights in the shape of the pipeline's transformer."""

    dataset_path: str | None = None
    """Folder of pictures and clips with NAME.txt beside each; or a list file (file TAB caption); or a .jsonl file; or the
    procedural world, as world:COUNT:FRAMESxHEIGHTxWIDTH (1+9x64x64 is pictures and clips in turn)."""

    held_out: str | None = None
    """Data for the held-out loss, in the same forms as --dataset-path. Without it no held-out loss is computed."""

    cache_dir: Path | None = None
    """Where the caches of embeddings and latents are. Default: the folder .cache in the data set's folder."""

    vae_checkpoint: Path | None = None
    """VAE weights in any dialect, in the place of the pipeline's VAE."""

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

    output_dir: Path = Path("runs/train")
    """Folder of the run: states to resume from, samples, metrics.jsonl, TensorBoard files, and the model at the end."""

    num_steps: int | None = None
    """Optimiser steps. Default: what --num-epochs takes."""

    num_epochs: int = 1
    """Passes over the data, where --num-steps is not given."""

    batch_size: int = 1
    """Samples computed together on each device; lower it when memory runs out and raise --gradient-accumulation."""

    gradient_accumulation: int = 1
    """Batches on each device that make one step; the gradient is that of all their samples together."""

    learning_rate: float = 1e-4
    """Step size after the warm-up: 1e-4 is usual for LoRA, 1e-5 for all weights of a trained model."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine fall to 0 at the last step."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises."""

    optimizer: Literal["adamw", "adafactor", "adamw8bit"] = "adamw"
    """Optimiser. adafactor and adamw8bit keep a fraction of adamw's state."""

    use_8bit_adam: bool = False
    """The same as --optimizer adamw8bit."""

    weight_decay: float = 0.01
    """Decoupled weight decay."""

    beta1: float = 0.9
    """Memory of the gradient's average, from 0 to 1."""

    beta2: float = 0.999
    """Memory of the gradient's square, from 0 to 1; 0.95 forgets spikes sooner."""

    clip_norm: float = 1.0
    """Most that the norm of all gradients may be; 0 for no limit."""

    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """What is computed in 16 bits while the weights stay as they are. 'auto' is bf16 on a GPU and no on the CPU."""

    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trained model's weights: bfloat16 halves them; see --rounding."""

    rounding: Literal["masters", "stochastic"] = "masters"
    """How small updates reach weights in bfloat16: a float32 copy in the optimiser, or rounding that is right on average and
    needs no copy."""

    lora_rank: int = 0
    """Train adapters of this rank beside frozen weights (LoRA); 0 trains all weights. 16 to 64 are usual."""

    lora_alpha: int | None = None
    """Scale of the adapters. Default: the rank."""

    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    """Layers that get adapters, by the ends of their names."""

    expert: Literal["auto", "high", "low"] = "auto"
    """Of a two-expert model, which to train: each on its own range of sigma. 'auto' is for models of one transformer."""

    sigma_sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    """Which sigmas are trained how often, before the shift: logit_normal favours the middle."""

    sigma_mean: float = 0.0
    """Mean of the logit of sigma, for logit_normal."""

    sigma_std: float = 1.0
    """Standard deviation of the logit of sigma, for logit_normal."""

    sigma_shift: float | None = None
    """Shift towards noise, as in sampling. Default: the model's own."""

    caption_dropout: float = 0.1
    """Share of samples that are trained with the empty caption, for guidance; 0 to 0.2 are usual."""

    pixel_loss_weight: float = 0.0
    """Weight of a second loss, in pixels through the VAE's decoder; it costs the VAE's memory and time."""

    vae_gradient_checkpointing: bool = False
    """Recompute the VAE's decoder in backward, with --pixel-loss-weight: slower, much less memory."""

    use_ema: bool = False
    """Keep a moving average of the weights; samples and the result are of the average."""

    ema_decay: float = 0.999
    """Memory of the moving average: 0.999 averages the last thousand steps."""

    activation_policy: Literal["none", "full", "selective"] = "none"
    """What backward recomputes: nothing, whole blocks, or all but attention."""

    gradient_checkpointing: bool = False
    """The same as --activation-policy full."""

    activations_to_host: bool = False
    """Send what is kept for backward to host memory, beside the computation."""

    placement: PlacementName = "gpu"
    """Where the transformer's weights live: 'gpu', or 'offload': in host memory, streamed to the card ahead of their use.
    Without --lora-rank the blocks' gradients and their optimiser are in host memory too, and work beside the card. With
    --lora-rank also 'disk' (streamed from their files), 'cpu' (which computes) and 'auto' (the fastest that fits)."""

    resident: str = "0"
    """With --placement offload and LoRA: blocks that stay on the card, or 'auto' for as many as the bus needs."""

    cuda_graphs: bool = False
    """Record the computation of each batch shape once and replay it: a model of a few million parameters, whose time goes
    into launching kernels, trains several times faster. One CUDA device, weights on it."""

    torch_compile: bool = False
    """Compile the blocks: slow first steps, then faster and smaller."""

    resume: str | None = None
    """Go on from a state: 'auto' for the newest complete one in --output-dir (or the start, if there is none), or a folder."""

    save_every: int = 500
    """Steps between states; 0 saves at the end alone."""

    keep: int = 2
    """Newest states that are kept."""

    log_every: int = 10
    """Steps between lines of metrics."""

    validate_every: int = 500
    """Steps between held-out losses, with --held-out; 0 for none before the end."""

    judge_samples: int = 0
    """With --held-out of the procedural world: how many of its captions are drawn and judged, together with the held-out
    loss. The judge says what share of a caption's attributes is there."""

    sample_every: int = 0
    """Steps between sample pictures; 0 for none."""

    sample_prompts: tuple[str, ...] = ()
    """Prompts of the samples. Default: the first captions of the data."""

    sample_steps: int = 20
    """Solver steps of each sample."""

    cfg_scale: float = 1.0
    """Guidance of the samples; 1 switches it off."""

    seed: int = 0
    """Seed of everything random; the same seed gives the same run."""

    workers: int = 2
    """Processes that read ahead; 0 reads in between."""

    device: str = "auto"
    """Where to compute: cuda, cuda:1, mps or cpu. 'auto' takes the best there is, under torchrun one GPU for each process."""

    dtype: DtypeName = "auto"
    """Precision of the text encoder when captions are encoded."""

    distributed: bool = False
    """Make sure that this was started by torchrun; ranks join anyway where it was."""

    memory_snapshot: Path | None = None
    """If device memory grows, write PyTorch's memory snapshot here and name the lines that hold it; costs some time."""

    def check(self) -> None:
        if self.model is None or self.dataset_path is None:
            missing = "--model" if self.model is None else "--dataset-path"
            raise UsageError(f"{missing} is missing.", fix="Say what to train with --model, and on what with --dataset-path.")
        if self.ckpt_path is not None and self.from_scratch:
            raise UsageError("--ckpt-path and --from-scratch were both given.", fix="Choose one start.")
        if self.gradient_checkpointing and self.activation_policy == "selective":
            raise UsageError("--gradient-checkpointing is another policy than selective.", fix="Leave one of them away.")
        if self.use_8bit_adam and self.optimizer == "adafactor":
            raise UsageError("--use-8bit-adam and --optimizer adafactor were both given.", fix="Choose one.")
        if self.rounding == "stochastic" and self.weights_dtype == "bfloat16" and self.optimizer_name != "adamw":
            raise UsageError("--rounding stochastic goes with adamw.", fix="Use --rounding masters.")
        if self.vae_gradient_checkpointing and self.pixel_loss_weight == 0:
            raise UsageError("--vae-gradient-checkpointing changes nothing without --pixel-loss-weight.", fix="Give both.")
        if self.lora_rank and self.from_scratch:
            raise UsageError("--lora-rank adapts trained weights, and --from-scratch has none.", fix="Choose one.")
        if self.cuda_graphs and (self.placement != "gpu" or self.activations_to_host):
            raise UsageError("--cuda-graphs is for weights and activations on the card.", fix="Leave it away.")
        if self.judge_samples and not (self.held_out or "").startswith("world"):
            raise UsageError("--judge-samples is for a held-out world.", fix="Add --held-out world-heldout:256:1x64x64.")
        if self.placement in ("balanced", "sequential", "custom"):
            raise UsageError(f"--placement {self.placement} is not for training.", fix="Take gpu, offload, disk or cpu.")
        if self.placement in ("disk", "cpu", "auto") and not self.lora_rank:
            raise UsageError(f"--placement {self.placement} cannot train all weights.", fix="Take gpu or offload.")
        if self.placement == "disk" and self.from_scratch:
            raise UsageError("--from-scratch has no weights on disk.", fix="Take another --placement.")
        if self.placement == "offload" and not self.lora_rank and self.optimizer_name != "adamw":
            raise UsageError("--placement offload trains all weights with adamw.", fix="Use --optimizer adamw, or --lora-rank.")
        if self.mixed_precision == "fp16" and self.weights_dtype == "bfloat16":
            raise UsageError("fp16 goes with weights in float32.", fix="Take --mixed-precision bf16, or no.")
        self._check_numbers()
        parse_resident(self.resident, "--resident")

    def _check_numbers(self) -> None:
        for flag, value, least in (
            ("--num-steps", self.num_steps, 1),
            ("--num-epochs", self.num_epochs, 1),
            ("--batch-size", self.batch_size, 1),
            ("--gradient-accumulation", self.gradient_accumulation, 1),
            ("--learning-rate", self.learning_rate, 0),
            ("--warmup-steps", self.warmup_steps, 0),
            ("--weight-decay", self.weight_decay, 0),
            ("--clip-norm", self.clip_norm, 0),
            ("--lora-rank", self.lora_rank, 0),
            ("--sigma-std", self.sigma_std, 1e-3),
            ("--pixel-loss-weight", self.pixel_loss_weight, 0),
            ("--save-every", self.save_every, 0),
            ("--keep", self.keep, 1),
            ("--log-every", self.log_every, 1),
            ("--validate-every", self.validate_every, 0),
            ("--sample-every", self.sample_every, 0),
            ("--judge-samples", self.judge_samples, 0),
            ("--sample-steps", self.sample_steps, 1),
            ("--cfg-scale", self.cfg_scale, 0),
            ("--seed", self.seed, 0),
            ("--workers", self.workers, 0),
        ):
            if value is not None and (not math.isfinite(value) or value < least):
                raise UsageError(f"{flag} {value} is out of range.", fix=f"Give {least} or more.")
        for flag, share in (
            ("--caption-dropout", self.caption_dropout),
            ("--ema-decay", self.ema_decay),
            ("--beta1", self.beta1),
            ("--beta2", self.beta2),
        ):
            if not 0 <= share <= 1:
                raise UsageError(f"{flag} {share} is not a share.", fix="Give a number from 0 to 1.")

    @property
    def optimizer_name(self) -> str:
        """The optimiser, by whichever flag it was asked for."""
        return "adamw8bit" if self.use_8bit_adam else self.optimizer

    @property
    def policy(self) -> str:
        """The activation policy, by whichever flag it was asked for."""
        return "full" if self.gradient_checkpointing else self.activation_policy
