"""``wandistiller train``: fine-tune Wan with flow matching on clips and captions, full or LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from wandistiller.config.placement import SPREAD, PlacementName, parse_resident
from wandistiller.config.training import check_idle, check_least, check_shares
from wandistiller.config.transformer_training import TransformerTrainingConfig
from wandistiller.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TransformerTrainingConfig):
    """Train a Wan transformer with flow matching on a folder of pictures and clips with captions.

    Captions and media are encoded once into caches; then only the transformer is in memory. The result is a diffusers folder
    (or a LoRA file) that `sample` and diffusers load, in --output-dir.
    """

    command: ClassVar[str] = "train"

    model: str | None = None
    """Pipeline to start from: a diffusers folder, a hub id (owner/name), or 'tiny'. Its encoders prepare the data."""

    ckpt_path: Path | None = None
    """Transformer weights to start from, in any dialect, in the place of the pipeline's own."""

    from_scratch: bool = False
    """Start from random weights in the shape of the pipeline's transformer."""

    output_dir: Path = Path("runs/train")
    """Folder of the run: states to resume from, samples, metrics.jsonl, TensorBoard files, and the model at the end."""

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

    caption_dropout: float = 0.1
    """Share of samples that are trained with the empty caption, for guidance; 0 to 0.2 are usual."""

    pixel_loss_weight: float = 0.0
    """Weight of a second loss, in pixels through the VAE's decoder; it costs the VAE's memory and time."""

    vae_gradient_checkpointing: bool = False
    """Recompute the VAE's decoder in backward, with --pixel-loss-weight: slower, much less memory."""

    placement: PlacementName = "gpu"
    """Where the transformer's weights live: 'gpu', or 'offload': in host memory, streamed to the card ahead of their use.
    Without --lora-rank the blocks' gradients and their optimiser are in host memory too, and work beside the card. With
    --lora-rank also 'disk' (streamed from their files), 'cpu' (which computes) and 'auto' (the fastest that fits)."""

    resident: str = "0"
    """With --placement offload: blocks that stay on the card, or 'auto' for as many as the bus needs."""

    def check(self) -> None:
        super().check()
        if self.model is None or self.dataset_path is None:
            missing = "--model" if self.model is None else "--dataset-path"
            raise UsageError(f"{missing} is missing.", fix="Say what to train with --model, and on what with --dataset-path.")
        if self.ckpt_path is not None and self.from_scratch:
            raise UsageError("--ckpt-path and --from-scratch were both given.", fix="Choose one start.")
        if self.rounding == "stochastic" and self.weights_dtype == "bfloat16" and self.optimizer_name != "adamw":
            raise UsageError("--rounding stochastic goes with adamw.", fix="Use --rounding masters.")
        if self.lora_rank and self.from_scratch:
            raise UsageError("--lora-rank adapts trained weights, and --from-scratch has none.", fix="Choose one.")
        if self.cuda_graphs and (self.placement != "gpu" or self.activations_to_host):
            raise UsageError("--cuda-graphs is for weights and activations on the card.", fix="Leave it away.")
        if self.is_sharded and self.placement != "gpu":
            raise UsageError(
                f"--placement {self.placement} does not go with --parallel {self.parallel}.",
                why="each card keeps a slice of the weights instead.",
                fix="Leave one of them away.",
            )
        if self.placement in SPREAD:
            fix = "Take gpu or offload; with --lora-rank also disk, cpu or auto."
            raise UsageError(f"--placement {self.placement} is not for training.", fix=fix)
        if self.placement in ("disk", "cpu", "auto") and not self.lora_rank:
            raise UsageError(
                f"--placement {self.placement} cannot train all weights.", fix="Take gpu or offload, or add --lora-rank."
            )
        if self.placement == "disk" and self.from_scratch:
            raise UsageError("--from-scratch has no weights on disk.", fix="Take another --placement.")
        if self.placement == "offload" and not self.lora_rank:
            self._check_training_on_host()
        if self.mixed_precision == "fp16" and self.weights_dtype == "bfloat16":
            raise UsageError("fp16 goes with weights in float32.", fix="Take --mixed-precision bf16, or no.")
        check_least(
            ("--lora-rank", self.lora_rank, 0),
            ("--lora-alpha", self.lora_alpha, 1),
            ("--pixel-loss-weight", self.pixel_loss_weight, 0),
        )
        if self.lora_rank and not self.lora_targets:
            why = "only adapters are trained, and no layer would have one."
            raise UsageError("--lora-targets names no layers.", why=why, fix="Name some (to_q to_k to_v), or leave it away.")
        check_shares(("--caption-dropout", self.caption_dropout))
        parse_resident(self.resident, "--resident")
        if not self.lora_rank:
            check_idle(self, "--lora-rank", "lora_alpha", "lora_targets")
        if self.weights_dtype == "float32":
            check_idle(self, "--weights-dtype bfloat16", "rounding")
        if self.placement != "offload":
            check_idle(self, "--placement offload", "resident")
        if not self.pixel_loss_weight:
            check_idle(self, "--pixel-loss-weight 0.1 or the like", "vae_gradient_checkpointing")

    def _check_training_on_host(self) -> None:
        """Raise ``UsageError`` for what an optimiser in host memory does not do."""
        if self.optimizer_name != "adamw":
            raise UsageError("--placement offload trains all weights with adamw.", fix="Use --optimizer adamw, or --lora-rank.")
        if self.mixed_precision == "fp16":
            raise UsageError("--placement offload trains all weights in bf16 or float32.", fix="Use --mixed-precision bf16.")
        if self.rounding == "stochastic":
            raise UsageError(
                "--rounding stochastic does not go with --placement offload.",
                why="the weights in host memory have float32 copies there.",
                fix="Leave --rounding away.",
            )
