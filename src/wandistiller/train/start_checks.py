"""What a training refuses before it starts, for those who start one and for those who plan one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wandistiller.config.distill import DistillConfig
from wandistiller.config.placement import SPREAD
from wandistiller.config.train import TrainConfig
from wandistiller.data.encode_job import plan_buckets
from wandistiller.errors import UsageError
from wandistiller.models.latents import check_positions, latent_shape


def check_ranks(config: TrainConfig, num_ranks: int) -> None:
    """Raise ``UsageError`` for what several ranks cannot do together."""
    if num_ranks > 1 and config.placement == "offload" and not config.lora_rank:
        raise UsageError(
            "Ranks that train together cannot each offload all weights.",
            why="gradients leave for the host before ranks could exchange them.",
            fix="Train adapters with --lora-rank, cut the weights into slices with --parallel fsdp, or start without torchrun.",
        )


def check_expert(config: TrainConfig, num_experts: int, boundary: float) -> None:
    """Raise ``UsageError`` where it is not clear which transformer of a model is trained."""
    if num_experts == 1 and config.expert != "auto":
        raise UsageError(f"--expert {config.expert}: this model has one transformer.", fix="Leave it away.")
    if num_experts > 1 and config.expert == "auto":
        raise UsageError(
            "This model has two experts, which are trained one at a time.",
            why=f"one is for sigma above {boundary}, the other for sigma below.",
            fix="Give --expert high or --expert low.",
        )


def check_sizes(config: TrainConfig, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for samples of which the transformer could not tell all positions apart."""
    for bucket in plan_buckets(vae, config.width, config.height, config.frames, config.max_aspect):
        check_positions(transformer, latent_shape(vae, bucket.shape))


def check_text_to_video(transformer: Mapping[str, Any], done: str) -> None:
    """Raise ``UsageError`` for a model that sees more than latents; ``done`` is what would be done with it."""
    if transformer["in_channels"] != transformer["out_channels"]:
        raise UsageError(f"Only text-to-video models can be {done} so far.", fix="Give a T2V or TI2V checkpoint.")


def check_sharded_teacher(config: DistillConfig, *, is_rank: bool) -> None:
    """Raise ``UsageError`` for slices of a teacher where torchrun starts nothing that could have them."""
    if config.strategy == "sharded" and not is_rank:
        raise UsageError(
            "--teacher-device-strategy sharded was given, but torchrun did not start this.",
            why="each of several processes keeps a slice of the teacher.",
            fix="Start it with torchrun, or let the teacher be streamed with --teacher-device-strategy offload.",
        )


def check_spread_teacher(config: DistillConfig, ranks_here: int, cards_each: int) -> None:
    """Refuse to spread a teacher over GPUs that belong to other ranks of the machine."""
    if ranks_here == 1 or config.strategy not in SPREAD:
        return
    if config.strategy == "custom":
        raise UsageError(
            "--teacher-device-strategy custom does not go with several ranks on a machine.",
            why="its map names GPUs, and each rank has others.",
            fix="Use balanced or sequential, which spread over a rank's own GPUs.",
        )
    if cards_each == 1:
        raise UsageError(
            f"--teacher-device-strategy {config.strategy} needs several GPUs, and each of {ranks_here} ranks has one.",
            fix="Start fewer ranks (--nproc-per-node), or spread the teacher over all of them with sharded.",
        )
