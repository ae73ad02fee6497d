"""A phase being worked out: roles are put where they belong, steps are played, and what all of it takes is read off."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from wandistiller.config.placement import SPREAD
from wandistiller.memory.device_map import shares
from wandistiller.memory.estimates import Item, Phase, Where
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.placement import Footprint, StreamPlan, Subject
from wandistiller.memory.scene import FEATURES, Made, Played, Scene
from wandistiller.memory.spread import foreseen_map
from wandistiller.memory.subjects import choose_placement
from wandistiller.memory.tape import Tape
from wandistiller.memory.uses import Use
from wandistiller.models.weight_files import Entry
from wandistiller.units import Bytes

_CUDA = torch.device("cuda")
_IN_A_FILE = Entry("", torch.uint8, (), Path(), 0)
Moment = Mapping[tuple[str, str], Bytes]
"""What is on the device at one time, by role and kind."""
NOTHING: Moment = MappingProxyType({})
HOST_STATE = 12
"""Bytes a weight that an optimiser in host memory keeps: a float32 copy and two moments."""


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Where a role's weights live."""

    name: str = "gpu"
    resident: int = 0
    eight_bit: bool = False
    device_map: Path | None = None
    """For ``custom``."""
    max_memory: Mapping[int | str, int] | None = None
    """The most that ``balanced`` and ``sequential`` may take of each card, and of the host (``cpu``)."""

    @property
    def is_streamed(self) -> bool:
        return self.name in ("offload", "disk")

    @property
    def is_spread(self) -> bool:
        """Whether parts are on several cards, and on the host where there is no room on any."""
        return self.name in SPREAD

    def spread(self, use: Use, hardware: Hardware) -> dict[str, list[int]]:
        """Return the bytes of each tensor by where it is."""
        if hardware.card is None:
            return {"cpu": [tensor.nbytes for _, tensor in named_tensors(use.model)]}
        given = self.max_memory or {}
        named = [card for card in given if isinstance(card, int)]
        # A process whose cards all have limits may have others than the first ones.
        cards = named if len(named) >= hardware.cards_each else range(hardware.cards_each)
        limits: dict[int | str, int] = dict.fromkeys(cards, hardware.room)
        limits["cpu"] = hardware.host_memory
        limits |= given
        # What a file holds otherwise than it is used is read once and kept in host memory.
        is_as_used = use.stored_dtype in (None, use.dtype)
        changed = self.device_map.stat().st_mtime_ns if self.device_map is not None else 0
        return _spread(use.model, self.name, tuple(limits.items()), self.device_map, changed, is_as_used)

    def computes_on_host(self, use: Use, hardware: Hardware) -> bool:
        """Say whether the CPU computes beside a card: by name, or because no part of the model is on one."""
        if not self.is_spread:
            return self.name == "cpu"
        return not any(place.startswith("cuda") for place in self.spread(use, hardware))

    def plan(self, use: Use) -> StreamPlan:
        """Return what streaming a transformer would make."""
        return _stream_plan(use.model, self.resident, self.eight_bit, use.trains == "everything")

    def footprint(self, use: Use) -> Footprint:
        """Return what streaming it takes of the host and of the disk."""
        trains = use.trains == "everything"
        placement = choose_placement(self.name, resident=self.resident, eight_bit=self.eight_bit, train=trains)
        return placement.predict(_subject(use), _CUDA)


def _subject(use: Use) -> Subject:
    return _subject_of(use.model)


def _subject_of(model: nn.Module) -> Subject:
    return Subject(model=model, blocks=list(model.get_submodule("blocks").children()))


@functools.lru_cache(maxsize=64)
def _spread(
    model: nn.Module,
    name: str,
    limits: tuple[tuple[int | str, int], ...],
    file: Path | None,
    changed: int,
    is_as_used: bool,
) -> dict[str, list[int]]:
    """Work a device map out once, however often it is asked for; ``changed`` says when its file was."""
    subject = _subject_of(model)
    device_map = foreseen_map(name, subject, dict(limits), file)
    return shares(replace(subject, locate=(lambda name: _IN_A_FILE) if is_as_used else None), device_map)


@functools.lru_cache(maxsize=64)
def _stream_plan(model: nn.Module, resident: int, eight_bit: bool, trains: bool) -> StreamPlan:
    """Work a plan out once for all that use a model, of which there is one for each configuration (see ``uses``)."""
    return StreamPlan(_subject_of(model), 2, resident, eight_bit, train=trains)


def left_by(use: Use, before: Played | None) -> Moment:
    """Return what a step has left, if there was one, for another's to be added to."""
    return {} if before is None else {(use.name, "added gradients"): Bytes(sum(before.left.values()))}


class Stage:
    """A phase being worked out."""

    def __init__(self, name: str, hardware: Hardware) -> None:
        self.name = name
        self._hardware = hardware
        self.scene = Scene()
        self._items: list[Item] = []
        self._moments: list[Moment] = []
        self._passing = Bytes(0)
        self._on_another_card = Bytes(0)
        self._apart: list[Moment] = []
        """Parts of moments."""
        card = hardware.card
        self.scene.hold("", "libraries", [card.workspace] if card is not None else [])

    def place(self, use: Use, placing: Placing, *, adds_gradients: bool = False, is_guest: bool = False) -> None:
        """Put a transformer's weights where they belong.

        ``adds_gradients`` says that a step adds up several batches', ``is_guest`` that of the cards with limits the first named
        is another one's home.
        """
        tensors = [*use.model.parameters(), *use.model.buffers()]
        if placing.computes_on_host(use, self._hardware):
            is_fixed = use.trains == "nothing"
            self.add(use.name, "weights", "host", sum(tensor.nbytes for tensor in tensors), is_shared=is_fixed)
            if is_fixed:
                self.add(use.name, "working memory", "host", Scene().play(use.tape, use.repeats).peak)
            return
        if placing.is_spread:
            home = next((card for card in placing.max_memory or {} if isinstance(card, int)), 0) if is_guest else None
            self._spread(use, placing.spread(use, self._hardware), home)
            return
        if not placing.is_streamed:
            self.scene.hold(use.name, "weights", [tensor.nbytes for tensor in tensors])
            return
        trains = use.trains == "everything"
        # Ranks have one copy of weights that nobody changes.
        is_shared = placing.name == "offload" and use.trains == "nothing"
        plan = placing.plan(use)
        self.stream(use.name, plan, placing.footprint(use), is_shared=is_shared)
        if trains:
            count, sizes = plan.num_streamed_weights, [layout.num_bytes for layout in plan.layouts]
            self.add(use.name, "optimiser", "host", count * HOST_STATE)
            # They stay where they arrive, or are added up in float32.
            arriving = 2 * max(sizes, default=0) if adds_gradients else sum(sizes)
            self.add(use.name, "gradients", "page-locked", arriving)
            self.add(use.name, "gradients", "host", 4 * count if adds_gradients else 0)

    def _spread(self, use: Use, found: Mapping[str, list[int]], home: int | None) -> None:
        """Put weights onto several cards, of which the fullest counts; ``home`` is the one that others are on.

        Those on the host visit a card layer by layer.
        """
        fullest = max((sizes for place, sizes in found.items() if place.startswith("cuda")), key=sum, default=[])
        own = fullest if home is None else found.get(f"cuda:{home}", [])
        if home is not None:
            self._on_another_card = Bytes(sum(fullest) + Scene().play(use.tape, use.repeats).peak)
        elsewhere = sum(found.get("cpu", [])) + sum(found.get("disk", []))
        self.scene.hold(use.name, "weights", own)
        layers = (sum(each.nbytes for each in module.parameters(recurse=False)) for module in use.model.modules())
        self.scene.hold(use.name, "slots", [max(layers)] if elsewhere else [])
        self.add(use.name, "weights", "page-locked", sum(found.get("cpu", [])))

    def stream(self, role: str, plan: StreamPlan, footprint: Footprint, *, is_shared: bool = False) -> None:
        """Let a model's blocks visit the device."""
        self.scene.hold(role, "slots", plan.slots)
        self.scene.hold(role, "weights", plan.outside)
        self.add(role, "weights", "page-locked", footprint.page_locked, is_shared=is_shared)
        self.add(role, "weights", "host", footprint.host, is_shared=is_shared)

    def place_slices(self, use: Use, slices: int) -> None:
        """Put a rank's slice of a transformer's weights there, and the blocks that are gathered: one in use, one on its way."""
        tensors = [*use.model.parameters(), *use.model.buffers()]
        self.scene.hold(use.name, "weights", [-(-tensor.nbytes // slices) for tensor in tensors])
        width = 2 if use.precision != "no" else use.dtype.itemsize
        largest = max(
            sum(each.numel() * width for each in block.parameters()) for block in use.model.get_submodule("blocks").children()
        )
        self.scene.hold(use.name, "gathered blocks", [largest] * 2)

    def add(self, role: str, kind: str, where: Where, size: int, *, is_shared: bool = False) -> None:
        """Count something that is not on the device."""
        if size:
            self._items.append(Item(role, kind, where, Bytes(size), is_shared=is_shared))

    def play(
        self,
        use: Use,
        there: Moment = NOTHING,
        *,
        keeps: Collection[int] = (),
        given: Sequence[Made] = (),
        staying: Collection[int] = (),
    ) -> Played:
        """Take a step; ``there`` is what others have left, and the rest as in ``Scene.play``."""
        return self._play(use.name, use.placed_tape, use.repeats, there, keeps, given, staying)

    def play_tape(self, role: str, tape: Tape, repeats: Mapping[str, int] = MappingProxyType({})) -> Played:
        """Take a step that is on tape."""
        return self._play(role, tape, repeats, NOTHING)

    def play_again(self, use: Use, before: Played, *, given: Sequence[Made] = ()) -> Played:
        """Take a step whose gradients are added to what one before it has left."""
        tape = use.placed_tape.with_added_gradients(by_block=use.policy != "none")
        return self._play(use.name, tape, use.repeats, left_by(use, before), given=given)

    def _play(
        self,
        role: str,
        tape: Tape,
        repeats: Mapping[str, int],
        there: Moment,
        keeps: Collection[int] = (),
        given: Sequence[Made] = (),
        staying: Collection[int] = (),
    ) -> Played:
        held = self.scene.held | dict(there)
        played = self.scene.play(tape, repeats, keeps=keeps, given=given, staying=staying)
        self._passing = max(self._passing, played.peak)
        own = {(role, kind): Bytes(held.get((role, kind), 0) + size) for kind, size in played.at_peak.items()}
        self._moments.append({**held, **own})
        # What was kept may have been used up at the worst moment, and gradients be there instead.
        features = self.scene.size(played.results)
        self._apart.append(
            {(role, "kept activations"): played.kept, (role, "gradients"): played.gradients, (role, FEATURES): features}
        )
        return played

    def note(self, role: str = "", played: Played | None = None) -> None:
        """Count what is there now: all that is held, and what a role's step has left."""
        held = self.scene.held
        left = sum(played.left.values()) if played is not None else 0
        rest = {"gradients": left, "working memory": self.scene.allocated - sum(held.values()) - left}
        self._moments.append({**held, **{(role, kind): Bytes(size) for kind, size in rest.items()}})

    def finished(self, seconds: float, num_steps: int = 0) -> Phase:
        """Return the phase."""
        self.note()
        worst = max(self._moments, key=lambda moment: sum(moment.values()))
        most: dict[tuple[str, str], Bytes] = {}
        for moment in (*self._moments, *self._apart):
            for label, size in moment.items():
                most[label] = max(most.get(label, Bytes(0)), size)
        items = [*self._items]
        items += [Item(*label, "device", size, worst.get(label, Bytes(0))) for label, size in most.items()]
        return Phase(
            name=self.name,
            items=tuple(item for item in items if item.size),
            peak=Bytes(sum(worst.values())),
            passing=self._passing,
            reserved=max(self.scene.reserved, self._on_another_card),
            seconds=seconds,
            num_steps=num_steps,
        )
