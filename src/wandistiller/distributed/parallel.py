"""How ranks share a training: each with the whole model (DDP), or each with a slice of it (FSDP2, hybrid)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from wandistiller.distributed.failures import is_rank
from wandistiller.distributed.ranks import Ranks, make_mesh
from wandistiller.errors import UsageError

ParallelName = Literal["auto", "ddp", "fsdp", "hsdp"]


@dataclass(frozen=True)
class Parallel:
    """What was chosen; ``shard_size`` ranks hold one copy of the model between them."""

    name: Literal["ddp", "fsdp", "hsdp"]
    shard_size: int = 1

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold slices."""
        return self.name != "ddp"

    def mesh(self, ranks: Ranks, device: torch.device) -> DeviceMesh | None:
        """Return how the ranks are arranged, once they have joined; None where each has the whole model.

        The last dimension is the one that a model is cut along; before it there may be one of ranks with the same slice.
        """
        if not self.is_sharded:
            return None
        if self.name == "fsdp":
            return make_mesh(device, (ranks.world_size,), ("shard",))
        return make_mesh(device, (ranks.world_size // self.shard_size, self.shard_size), ("replicate", "shard"))


def choose_parallel(asked: ParallelName, shard_size: int | None, ranks: Ranks) -> Parallel:
    """Return how ranks train together, or raise ``UsageError``; nothing is loaded.

    ``auto`` that nobody has settled is DDP: the whole model on each card is the fastest where it fits.
    """
    # Inside of a machine the links are fast; between machines only gradients travel, once a step.
    size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_parallel(asked, size, ranks.world_size if is_rank() else None)
    if asked in ("auto", "ddp"):
        return Parallel("ddp")
    if asked == "fsdp":
        return Parallel("fsdp", ranks.world_size)
    return Parallel("hsdp", size)


def check_parallel(asked: ParallelName, shard_size: int, num_ranks: int | None) -> None:
    """Raise ``UsageError`` for what so many ranks cannot do; None where torchrun starts nothing."""
    if asked != "auto" and num_ranks is None:
        raise UsageError(
            f"--parallel {asked} was given, but torchrun did not start this.",
            why="it says how several processes train together.",
            fix="Start it with torchrun, or leave --parallel away.",
        )
    if asked == "hsdp" and num_ranks is not None and num_ranks % shard_size:
        raise UsageError(
            f"{num_ranks} ranks cannot be split into groups of {shard_size}.",
            why="with --parallel hsdp each group holds the model once.",
            fix="Give a --shard-size that divides the number of ranks, or use --parallel fsdp.",
        )
