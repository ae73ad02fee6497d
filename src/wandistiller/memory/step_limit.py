"""What limits a step: the part of a machine that would shorten it most, were it twice as fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import combinations
from typing import Any

from wandistiller.memory.estimates import Phase
from wandistiller.memory.hardware import Hardware

_LEAST_GAIN = 0.05
"""Share of a step that makes a part worth naming."""


def limit_of(phase: Phase, hardware: Hardware) -> str | None:
    """Return the part of a machine, or the two, that a phase's steps wait for most; None for what is done once."""
    if phase.num_steps == 0 or phase.work is None or not 0 < phase.seconds < float("inf"):
        return None
    seconds = phase.work.seconds(hardware)
    # Where several parts work beside each other and are as slow, none alone makes a step shorter, and then it may be two.
    for count in (1, 2):
        gains = {names: seconds - phase.work.seconds(_faster(hardware, names)) for names in combinations(_PARTS, count)}
        names = max(gains, key=lambda each: gains[each])
        if gains[names] > _LEAST_GAIN * seconds:
            return " and ".join(names)
    return None


def _faster(hardware: Hardware, names: tuple[str, ...]) -> Hardware:
    return reduce(lambda machine, name: _PARTS[name](machine), names, hardware)


def _card(hardware: Hardware) -> Hardware:
    card = hardware.card
    if card is None:
        return hardware
    matmul = {dtype: 2 * rate for dtype, rate in card.matmul.items()}
    return replace(hardware, card=replace(card, matmul=matmul, attention=2 * card.attention, bandwidth=2 * card.bandwidth))


def _launches(hardware: Hardware) -> Hardware:
    card = hardware.card
    return hardware if card is None else replace(hardware, card=replace(card, launch_seconds=card.launch_seconds / 2))


def _links(hardware: Hardware) -> Hardware:
    twice = replace(hardware, network_rate=2 * hardware.network_rate)
    return twice if twice.card is None else replace(twice, card=replace(twice.card, link_rate=2 * twice.card.link_rate))


def _fields(*names: str) -> Callable[[Hardware], Hardware]:
    def faster(hardware: Hardware) -> Hardware:
        changes: dict[str, Any] = {name: 2 * getattr(hardware, name) for name in names}
        return replace(hardware, **changes)

    return faster


_PARTS: dict[str, Callable[[Hardware], Hardware]] = {
    "the card": _card,
    "the host, which launches kernels": _launches,
    "the bus": _fields("bus_rate"),
    "the disk": _fields("disk_rate"),
    "updates in host memory": _fields("host_speedup"),
    "the CPU": _fields("host_flops", "host_attention", "host_bandwidth"),
    "what ranks send each other": _links,
}
