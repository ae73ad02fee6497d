"""What a machine has and how fast it is: read and measured here, or said, or known by a card's name.

The H200's rates are measured, by this project's benchmarks on whole Wan models. Those of other cards are their published peaks
times the share of its own that the H200 reaches, so a time for them is to choose by; memory does not depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from wandistiller.errors import UsageError, nearest
from wandistiller.memory.host_limits import available_host_memory, total_host_memory
from wandistiller.units import Bytes

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of GPU."""

    name: str
    memory: Bytes
    """What the driver says it has."""
    context: Bytes = field(default_factory=lambda: Bytes(550 * MIB))
    """Taken by CUDA and the libraries' code before the first tensor."""
    workspace: Bytes = field(default_factory=lambda: Bytes(64 * MIB))
    """Kept by the libraries for matrix products, in the allocator's memory."""
    matmul: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Operations a second in matrix products, by dtype."""
    attention: float = 1e12
    """Operations a second in attention, in 16 bits."""
    bandwidth: float = 1e11
    """Bytes a second that kernels read and write."""
    link_rate: float = 20e9
    """Bytes a second to the next card of the machine, each way: over the bus, or over links of their own."""
    launch_seconds: float = 18e-6
    """Time of the host for one kernel that Python asks for; measured where the card is."""
    rates_of: str = "its published figures"
    """Where its speed is from, unless it was measured."""

    @property
    def usable(self) -> Bytes:
        """What tensors can have."""
        return Bytes(max(self.memory - self.context, 0))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine, or several alike."""

    card: Card | None
    """None where there is no GPU."""
    num_cards: int = 1
    """In each machine that have a process of their own."""
    cards_each: int = 1
    """Cards that a process can spread a model over."""
    num_nodes: int = 1
    free: Bytes | None = None
    """Free now on the card, without what this process takes for CUDA; None for a card that is not here."""
    host_memory: Bytes
    bus_rate: float = 25e9
    """Bytes a second from page-locked host memory to a card, and back at the same time."""
    disk_rate: float = 2e9
    host_rate: float | None = 40e9
    """Bytes a second that an optimiser in host memory reads and writes; None to measure it here, where one is asked about."""
    host_speedup: float = 1.0
    """How many times faster than that it is; for asking what would come of it."""
    host_flops: float = 2e11
    """Operations a second of the CPU in matrix products."""
    host_attention: float = 2e11
    """The same in attention, which it computes in float32 whatever it is given."""
    host_bandwidth: float = 1e10
    """Bytes a second that the CPU's other computations read and write."""
    network_rate: float = 10e9
    """Bytes a second between machines, for each card."""

    @property
    def update_rate(self) -> float:
        """Bytes a second that an optimiser in host memory reads and writes."""
        from wandistiller.memory.rates import update_rate

        return self.host_speedup * (update_rate() if self.host_rate is None else self.host_rate)

    @property
    def link_rate(self) -> float:
        """Bytes a second between the cards of a machine, or between processes that compute on its CPU."""
        return self.card.link_rate if self.card is not None else 1e10

    @property
    def all_cards(self) -> int:
        """Of each machine."""
        return self.num_cards * self.cards_each

    @property
    def num_ranks(self) -> int:
        """Processes that train together: one a card, where there are several."""
        return max(self.num_cards, 1) * self.num_nodes

    @property
    def room(self) -> Bytes:
        """What tensors can have on a card."""
        if self.card is None:
            return self.host_memory
        return self.card.usable if self.free is None else self.free


def _published(name: str, gib: float, tflops: float, bandwidth_gb: float, link_gb: float = 25) -> Card:
    """Return a card from its published figures: memory, dense bfloat16 with float32 sums, bandwidth, links each way."""
    peak, rate = tflops * 1e12, bandwidth_gb * 1e9
    return Card(
        name=name,
        memory=Bytes(round(gib * GIB * 0.985)),
        matmul={"bfloat16": 0.78 * peak, "float16": 0.78 * peak, "float32": 0.05 * peak, "convolution": 0.4 * peak},
        attention=0.6 * peak,
        bandwidth=0.55 * rate,
        link_rate=0.8 * link_gb * 1e9,
    )


H200 = Card(
    name="h200",
    memory=Bytes(143_771 * MIB),
    matmul={"bfloat16": 773e12, "float16": 773e12, "float32": 50e12, "convolution": 400e12},
    attention=593e12,
    bandwidth=2.62e12,
    link_rate=0.8 * 450e9,
    rates_of="",
)
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _published("rtx3060", 12, 25.5, 360),
        _published("rtx3090", 24, 71, 936),
        _published("rtx4060", 8, 30, 272),
        _published("rtx4060ti", 16, 44, 288),
        _published("rtx4070tisuper", 16, 88, 672),
        _published("rtx4080", 16, 97, 717),
        _published("rtx4090", 24, 165, 1008),
        _published("rtx5070ti", 16, 88, 896),
        _published("rtx5080", 16, 113, 960),
        _published("rtx5090", 32, 209, 1792),
        _published("a6000", 48, 155, 768),
        _published("rtx6000ada", 48, 364, 960),
        _published("rtxpro6000", 96, 500, 1792),
        _published("l4", 24, 121, 300),
        _published("l40s", 48, 362, 864),
        _published("a100-40gb", 40, 312, 1555, 300),
        _published("a100-80gb", 80, 312, 2039, 300),
        _published("h100", 80, 989, 3350, 450),
        H200,
        _published("b200", 180, 2250, 8000, 900),
    )
}


def find_card(name: str) -> Card:
    """Return a card by name, however it is written: rtx4090, RTX 4090, NVIDIA GeForce RTX 4090."""
    words = "-".join(name.lower().replace("nvidia", "").replace("geforce", "").replace("_", " ").split())
    plain = re.sub(r"(?<=rtx)-|(?<=pro)-(?=\d)|(?<=\d)-(?=ti|super|ada)|(?<=ti)-(?=super)", "", words)

    def is_named(key: str) -> bool:
        return all(re.search(rf"(?<![a-z\d])(rtx)?{part}(?!\d)", plain) for part in key.split("-"))

    matches = [CARDS[plain]] if plain in CARDS else [card for key, card in CARDS.items() if is_named(key)]
    if not matches:
        raise UsageError(
            f"There is no card '{name}' in the table{nearest(plain, CARDS)}",
            fix=f"Use one of {', '.join(CARDS)}; or say its memory with --gpu 24GiB.",
        )
    return max(matches, key=lambda card: len(card.name))


def detect(*, measures: bool = True) -> Hardware:
    """Read what this machine has; the bus and rates of a card that is not in the table are measured in moments.

    Without ``measures`` nothing is tried, for when there is no memory to try it in: what is not known is as usual.
    """
    from wandistiller.memory.monitor import device_memory
    from wandistiller.memory.rates import copy_rate, elementwise_rate, fastest_cpu_dtype, launch_seconds, matmul_rate

    # Beside a card the CPU has roles in what it is fastest in, and alone in float32.
    has_card = torch.cuda.is_available()
    cpu: dict[str, Any] = {}
    if measures:
        dtype = fastest_cpu_dtype() if has_card else torch.float32
        of_dtype, of_float = (matmul_rate(torch.device("cpu"), each) for each in (dtype, torch.float32))
        cpu = {"host_flops": of_dtype, "host_attention": of_float, "host_bandwidth": elementwise_rate(dtype)}
    host_rate = None if measures else 40e9
    host = available_host_memory()
    if not has_card:
        return Hardware(
            card=None,
            num_cards=0,
            host_memory=host,
            host_rate=host_rate,
            **cpu,
        )
    device = torch.device("cuda", torch.cuda.current_device())
    memory = device_memory(device)
    name = torch.cuda.get_device_name(device)
    try:
        card = replace(find_card(name), memory=memory.total)
    except UsageError:
        rate = matmul_rate(device, torch.bfloat16) if measures else 1e14
        card = replace(_published(name, memory.total / GIB / 0.985, rate / 0.78e12, 1000.0), memory=memory.total, rates_of="")
    return Hardware(
        card=replace(card, launch_seconds=launch_seconds(device)) if measures else card,
        num_cards=1,  # there is one process, unless ranks are asked for
        cards_each=torch.cuda.device_count(),
        free=Bytes(memory.free + memory.reserved),
        host_memory=host,
        bus_rate=copy_rate(device) if measures else 25e9,
        host_rate=host_rate,
        **cpu,
    )


def described(
    *,
    card: str | None = None,
    gpu: Bytes | None = None,
    num_cards: int | None = None,
    num_nodes: int = 1,
    host_memory: Bytes | None = None,
    bus_rate: float | None = None,
    disk_rate: float | None = None,
    network_rate: float | None = None,
) -> Hardware:
    """Return the machine that is described, and this one for what is not said."""
    if card is None and gpu is None and num_cards != 0:
        found = detect()
        if num_cards is not None and found.card is None:
            raise UsageError(
                f"Which {num_cards} GPUs there will be is not known: there is none here.",
                fix="Say it with --card rtx4090 or --gpu 24GiB; or --gpus 0 for the CPU alone.",
            )
    else:
        chosen = H200 if card is None else find_card(card)
        if gpu is not None:
            # Its own are as they are known; of another card it is said whose they are.
            chosen = replace(chosen, name=f"{gpu} card", memory=gpu, rates_of=f"that of the {chosen.name}")
        found = Hardware(
            card=None if num_cards == 0 else chosen,
            num_cards=1 if num_cards is None else num_cards,
            host_memory=total_host_memory(),
        )
    changes: dict[str, Any] = {
        "num_cards": num_cards,
        "cards_each": None if num_cards is None else 1,
        "num_nodes": num_nodes,
        "host_memory": host_memory,
        "bus_rate": bus_rate,
        "disk_rate": disk_rate,
        "network_rate": network_rate,
    }
    return replace(found, **{name: value for name, value in changes.items() if value is not None})
