"""How long a step takes with the weights where they live: on the device, in host memory, on the disk, on several ranks."""

from __future__ import annotations

from dataclasses import replace

from wandistiller.memory.durations import Seconds, read_ahead, step_seconds, streamed
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Use

_VISIT_LAUNCHES = 6
"""What accelerate's hooks do on the host for each tensor that visits a card, as kernels that could be launched meanwhile:
0.11 ms where one takes 18 us, for tensors so small that copying them takes no time."""


def forward_seconds(use: Use, placing: Placing, hardware: Hardware) -> float:
    """Return the time of one pass of a frozen transformer."""
    seconds = step_seconds(use.tape, use.repeats, hardware, is_compiled=use.is_compiled)
    return placed_seconds(seconds, use, placing, hardware).total


def gathered_seconds(use: Use, slices: int, hardware: Hardware) -> float:
    """Return the time in which ranks bring a frozen transformer's slices together for one pass, beside the computation."""
    is_within = slices <= max(hardware.num_cards, 1)
    weights = sum(each.nbytes for each in use.model.parameters())
    return weights * (slices - 1) / slices / (hardware.link_rate if is_within else hardware.network_rate)


def placed_seconds(seconds: Seconds, use: Use, placing: Placing, hardware: Hardware) -> Seconds:
    """Return the time of a step with the weights where they live."""
    if hardware.card is not None and placing.computes_on_host(use, hardware):
        return step_seconds(use.tape, use.repeats, replace(hardware, card=None))
    if placing.is_spread and hardware.card is not None:
        # One card after the other computes; what is on the host is copied there when its turn comes, beside nothing.
        found = placing.spread(use, hardware)
        in_memory, on_disk = found.get("cpu", []), found.get("disk", [])
        brought = sum(in_memory) / hardware.bus_rate + sum(on_disk) / hardware.disk_rate
        visits = len(in_memory + on_disk) * _VISIT_LAUNCHES * hardware.card.launch_seconds
        return replace(seconds, forward=seconds.forward + brought + visits)
    if not placing.is_streamed:
        return seconds
    plan = placing.plan(use)
    if placing.name == "disk":  # where there may be more of them than arrive, or less
        read = (use.stored_dtype or use.dtype).itemsize / use.dtype.itemsize
        return read_ahead(seconds, plan.moved_bytes / min(hardware.disk_rate / read, hardware.bus_rate))
    unpack = plan.unpacked_bytes / hardware.card.bandwidth if hardware.card is not None else 0.0
    return streamed(seconds, plan.ring, plan.moved_bytes / hardware.bus_rate, unpack)
