"""How ranks share a sampling: those of a group compute each clip together, and groups draw different prompts."""

from __future__ import annotations

from wandistiller.config.placement import SPREAD
from wandistiller.config.sample import SampleConfig
from wandistiller.distributed.context import check_clip_groups
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import UsageError

PATIENCE_SECONDS = 24 * 3600.0
"""How long ranks wait for the one that reads and encodes; torchrun ends them if that one fails."""


def check_ranks(config: SampleConfig, ranks: Ranks) -> None:
    """Raise ``UsageError`` where these ranks cannot do what is asked for; nothing is read."""
    check_clip_groups("--context-parallel", config.context_parallel, ranks)
    if ranks.world_size > 1 and config.placement_name in SPREAD:
        raise UsageError(
            f"--placement {config.placement_name} spreads a model over several GPUs, and each rank has one.",
            fix="Start without torchrun, or choose another placement.",
        )


def check_prompts(config: SampleConfig, num_prompts: int, ranks: Ranks) -> None:
    """Raise ``UsageError`` where some ranks would have nothing to draw."""
    groups = ranks.world_size // config.context_parallel
    if num_prompts >= groups:
        return
    who = f"{groups} ranks" if config.context_parallel == 1 else f"{groups} groups of {config.context_parallel} ranks"
    sizes = (size for size in range(1, ranks.world_size + 1) if ranks.world_size % size == 0)
    size = next(size for size in sizes if ranks.world_size // size <= num_prompts)
    raise UsageError(
        f"There are {who}, and {num_prompts} {'prompt' if num_prompts == 1 else 'prompts'} to draw.",
        why="each draws prompts of its own.",
        fix=f"Let ranks compute each clip together with --context-parallel {size}, or start fewer of them.",
    )
