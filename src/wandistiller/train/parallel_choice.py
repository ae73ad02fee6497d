"""How ranks train together where the user leaves it open: by what is foreseen for one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import psutil
import torch

from wandistiller.config.training import TrainingConfig
from wandistiller.distributed.ranks import read_ranks
from wandistiller.errors import UsageError
from wandistiller.memory.estimates import margin
from wandistiller.memory.hardware import Hardware, detect
from wandistiller.memory.works import Training
from wandistiller.terminal import say
from wandistiller.train.forecast import of_this_job
from wandistiller.units import Bytes

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)


def settle_parallel(config: ConfigT, device: torch.device, work: Callable[[ConfigT, Hardware], Training]) -> ConfigT:
    """Return the configuration with ``--parallel auto`` settled: the whole model on each rank where it fits, else slices.

    Every rank has to come to the same, so what counts is the memory that a card has, not what is free on it.
    """
    ranks = read_ranks()
    if config.parallel != "auto" or ranks.world_size == 1:
        return config
    hardware = _hardware(device)
    ways = list(_ways(config, hardware))
    chosen = ways[-1]
    for way in ways:
        needed = work(way, hardware).phase(hardware).reserved
        if needed + margin(needed) <= hardware.room:
            chosen = way
            break
    if ranks.is_first:
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
