"""A phase being worked out: roles are put where they belong, steps are played, and what all of it takes is read off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from wandistiller.memory.estimates import Item, Phase, Where
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.placement import Footprint, StreamPlan, Subject
from wandistiller.memory.scene import Played, Scene
from wandistiller.memory.subjects import choose_placement
from wandistiller.memory.tape import Tape
from wandistiller.memory.uses import Use
from wandistiller.units import Bytes

_CUDA = torch.device("cuda")
_HOST_STATE = 12
"""Bytes a weight that an optimiser in host memory keeps: a float32 copy and two moments."""


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Where a role's weights live."""

    name: str = "gpu"
    resident: int = 0
    eight_bit: bool = False

    @property
    def is_streamed(self) -> bool:
        return self.name in ("offload", "disk")

    def plan(self, use: Use) -> StreamPlan:
        """Return what streaming a transformer would make."""
        return StreamPlan(_subject(use), 2, self.resident, self.eight_bit, train=use.trains == "everything")


def _subject(use: Use) -> Subject:
    return Subject(model=use.model, blocks=list(use.model.get_submodule("blocks").children()))


class Stage:
    """A phase being worked out."""

    def __init__(self, name: str, hardware: Hardware) -> None:
        self.name = name
        self.scene = Scene()
        self._items: list[Item] = []
        self._played: list[tuple[str, Played]] = []
        card = hardware.card
        self.scene.hold("", "libraries", [card.workspace] if card is not None else [])

    def place(self, use: Use, placing: Placing) -> None:
        """Put a transformer's weights where they belong."""
        subject = _subject(use)
        tensors = [*use.model.parameters(), *use.model.buffers()]
        if placing.name == "cpu":
            self.add(use.name, "weights", "host", sum(tensor.nbytes for tensor in tensors))
            return
        if not placing.is_streamed:
            self.scene.hold(use.name, "weights", [tensor.nbytes for tensor in tensors])
            return
        trains = use.trains == "everything"
        placement = choose_placement(placing.name, resident=placing.resident, eight_bit=placing.eight_bit, train=trains)
        self.stream(use.name, placing.plan(use), placement.predict(subject, _CUDA))
        if trains:
            self.add(use.name, "gradients", "page-locked", 2 * max(use.block_bytes))
            count = sum(each.numel() for each in use.model.get_submodule("blocks").parameters())
            self.add(use.name, "optimiser", "host", count * _HOST_STATE)
            self.add(use.name, "gradients", "host", sum(use.block_bytes))

    def stream(self, role: str, plan: StreamPlan, footprint: Footprint) -> None:
        """Let a model's blocks visit the device."""
        self.scene.hold(role, "slots", plan.slots)
        self.scene.hold(role, "weights", plan.outside)
        self.add(role, "weights", "page-locked", footprint.page_locked)
        self.add(role, "weights", "host", footprint.host)

    def place_slices(self, use: Use, slices: int) -> None:
        """Put a rank's slice of a transformer's weights there, and the blocks that are gathered: one in use, one on its way."""
        tensors = [*use.model.parameters(), *use.model.buffers()]
        self.scene.hold(use.name, "weights", [-(-tensor.nbytes // slices) for tensor in tensors])
        width = 2 if use.precision != "no" else use.dtype.itemsize
        largest = max(
            sum(each.numel() * width for each in block.parameters()) for block in use.model.get_submodule("blocks").children()
        )
        self.scene.hold(use.name, "gathered blocks", [largest] * 2)

    def add(self, role: str, kind: str, where: Where, size: int) -> None:
        """Count something that is not on the device."""
        if size:
            self._items.append(Item(role, kind, where, Bytes(size)))

    def play(self, use: Use) -> Played:
        """Take a step."""
        return self.play_tape(use.name, use.placed_tape, use.repeats)

    def play_tape(self, role: str, tape: Tape, repeats: Mapping[str, int] = MappingProxyType({})) -> Played:
        """Take a step that is on tape."""
        played = self.scene.play(tape, repeats)
        self._played.append((role, played))
        return played

    def finished(self, seconds: float, num_steps: int = 1) -> Phase:
        """Return the phase."""
        items = list(self._items)
        items += [Item(role, kind, "device", size) for (role, kind), size in self.scene.held.items() if size]
        held = sum(self.scene.held.values())
        peak = max((played.peak for _, played in self._played), default=Bytes(held))
        for role, played in self._played[-1:]:
            # At the worst moment, what was kept may have been used up and gradients be there instead.
            items.append(Item(role, "gradients", "device", Bytes(sum(played.left.values()))))
            items.append(Item(role, "kept activations", "device", played.kept))
        return Phase(
            name=self.name,
            items=tuple(item for item in items if item.size),
            peak=peak,
            reserved=self.scene.reserved,
            seconds=seconds,
            num_steps=num_steps,
        )
