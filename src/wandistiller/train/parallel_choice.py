"""How ranks train together where the user leaves it open: by what is foreseen for one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import psutil
import torch

from wandistiller.config.training import TrainingConfig
from wandistiller.distributed.parallel import Parallel, choose_parallel
from wandistiller.distributed.ranks import read_ranks
from wandistiller.errors import UsageError
from wandistiller.memory.estimates import margin
from wandistiller.memory.forecast import of_this_job
from wandistiller.memory.hardware import Hardware, detect
from wandistiller.memory.works import Training
from wandistiller.terminal import say
from wandistiller.units import Bytes

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)


def settle_parallel(config: ConfigT, device: torch.device, work: Callable[[ConfigT, Hardware], Training]) -> Parallel:
    """Return how ranks train together; ``--parallel auto`` is the whole model on each where it fits, else slices.

    Every rank has to come to the same, so what counts is the memory that a card has, not what is free on it.
    """
    ranks = read_ranks()
    if config.parallel == "auto" and ranks.world_size > 1:
        config = _fitting(config, _hardware(device), work)
    return choose_parallel(config.parallel, config.shard_size, ranks)


def as_settled(config: ConfigT, parallel: Parallel) -> ConfigT:
    """Return the configuration of a run whose ranks have slices as one that asks for them, to predict it by.

    The run itself keeps what was asked for: what is written down of it suits another number of ranks as well.
    """
    return replace(config, parallel=parallel.name) if parallel.is_sharded else config


def _fitting(config: ConfigT, hardware: Hardware, work: Callable[[ConfigT, Hardware], Training]) -> ConfigT:
    ways = list(_ways(config, hardware))
    chosen = ways[-1]
    for way in ways:
        try:
            needed = work(way, hardware).phase(hardware).reserved
        except Exception as error:  # noqa: BLE001 - a prediction must not cost anybody a run
            if read_ranks().is_first:
                say(f"--parallel ddp: what a rank takes cannot be foreseen: {type(error).__name__}: {error}")
            return ways[0]
        if needed + margin(needed) <= hardware.room:
            chosen = way
            break
    if read_ranks().is_first:
        say(f"--parallel {chosen.parallel}: a rank takes {needed} of {hardware.room}, as foreseen")
    return chosen


def _ways(config: ConfigT, hardware: Hardware) -> Iterator[ConfigT]:
    """Give what is possible, the fastest first."""
    yield replace(config, parallel="ddp")
    for name in ("hsdp", "fsdp") if hardware.num_nodes > 1 else ("fsdp",):
        way = replace(config, parallel=name)
        try:
            way.check()
        except UsageError:  # slices do not go with everything
            continue
        yield way


def _hardware(device: torch.device) -> Hardware:
    if device.type == "cuda":
        return replace(of_this_job(detect(measures=False)), free=None)
    hardware = of_this_job(Hardware(card=None, num_cards=0, host_memory=Bytes(psutil.virtual_memory().total)))
    return replace(hardware, host_memory=Bytes(hardware.host_memory // max(hardware.num_cards, 1)))
