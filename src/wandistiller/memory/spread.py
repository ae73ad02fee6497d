"""Placements that spread a model by a device map, through accelerate's hooks.

``balanced`` spreads the blocks evenly over the GPUs, ``sequential`` fills one after the other, ``custom`` takes a map from a
file. What is on the CPU visits the GPU when its turn comes, from page-locked memory.
"""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import get_balanced_memory, get_max_memory
from torch import Tensor, nn

from wandistiller.errors import UsageError
from wandistiller.memory.device_map import (
    DeviceMap,
    check_device_map,
    computing_device,
    device_name,
    device_of,
    flatten_device_map,
    main_device,
    placed_tensors,
    read_device_map,
    shares,
    visits_a_card,
    without_overlaps,
)
from wandistiller.memory.host import HostBudget, allocate_host, whole_pages
from wandistiller.memory.layout import BlockLayout, bind, lay_out, named_tensors, unbind
from wandistiller.memory.placement import Footprint, Placed, Placement, Subject, register_placement
from wandistiller.units import Bytes


class ByDeviceMap(Placement):
    """What the three have in common: a map, and accelerate's hooks that follow it."""

    @abstractmethod
    def device_map(self, subject: Subject) -> DeviceMap:
        """Return the device of each part."""

    def predict(self, subject: Subject, device: torch.device) -> Footprint:
        return _footprint(subject, without_overlaps(subject.model, self.device_map(subject)))

    @torch.inference_mode(False)  # weights that are made here may be trained, or kept for backward, later
    def attach(self, subject: Subject, device: torch.device) -> Placed:
        device_map = self.device_map(subject)
        check_device_map(device_map, subject.model)
        device_map = without_overlaps(subject.model, device_map)
        footprint = _footprint(subject, device_map)
        locked = set[int]()
        empty = {name for name, tensor in named_tensors(subject.model) if tensor.is_meta}
        on_host: dict[str, Tensor] = {}
        try:
            on_host, on_disk = _load(subject, device_map, locked)
            # An index that is empty is one too: all of what is on disk has to be converted, and is in host memory.
            index = on_disk if "disk" in device_map.values() else None
            main = main_device(device_map)
            with _quietly():
                dispatch_model(subject.model, device_map, main, on_host or None, offload_index=index, force_hooks=True)
            for name, place in _split_modules(subject.model, device_map).items():
                add_hook_to_module(subject.model.get_submodule(name), AlignDevicesHook(computing_device(place, main)))
        except BaseException:
            _take_away(subject.model)
            for name, tensor in named_tensors(subject.model):
                if name in empty:  # nobody has waited for it yet, and a card's would have to find room
                    unbind(tensor)
                    continue
                if tensor.is_meta:  # accelerate was about to bring it when its turn comes
                    bind(tensor, on_host[name])
                _to_ordinary_memory(tensor, locked)
            raise
        return Placed(footprint, lambda: _undo(subject, locked))


@register_placement("balanced")
@dataclass(frozen=True, kw_only=True)
class Balanced(ByDeviceMap):
    """Blocks spread evenly over the GPUs, the rest of them on the CPU where there is no room."""

    max_memory: Mapping[int | str, int] | None = None
    """Most bytes for each GPU (by number) and for ``cpu``; what is free, if not given."""

    def device_map(self, subject: Subject) -> DeviceMap:
        unsplit = _unsplit(subject)
        limits = get_balanced_memory(subject.model, max_memory=_limits(self.max_memory), no_split_module_classes=unsplit)
        return dict(infer_auto_device_map(subject.model, max_memory=limits, no_split_module_classes=unsplit))


@register_placement("sequential")
@dataclass(frozen=True, kw_only=True)
class Sequential(ByDeviceMap):
    """One GPU after the other filled, then the CPU."""

    max_memory: Mapping[int | str, int] | None = None

    def device_map(self, subject: Subject) -> DeviceMap:
        limits = get_max_memory(_limits(self.max_memory))
        return dict(infer_auto_device_map(subject.model, max_memory=limits, no_split_module_classes=_unsplit(subject)))


@register_placement("custom")
@dataclass(frozen=True, kw_only=True)
class Custom(ByDeviceMap):
    """A map from a JSON or TOML file, or given as it is."""

    map: Path | Mapping[str, Any]

    def device_map(self, subject: Subject) -> DeviceMap:
        found = read_device_map(self.map) if isinstance(self.map, Path) else flatten_device_map(self.map)
        check_device_map(found, subject.model)
        return found


def foreseen_map(name: str, subject: Subject, cards: Mapping[int | str, int], file: Path | None = None) -> DeviceMap:
    """Return the map that a placement would make on a machine whose cards and host (``cpu``) have so many bytes."""
    if name == "custom":
        assert file is not None
        found = read_device_map(file)
        check_device_map(found, subject.model, sum(isinstance(card, int) for card in cards))
        return without_overlaps(subject.model, found)
    # It warns of every card that is not here, and the machine may be another one.
    logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)
    with _quietly():
        return (Balanced if name == "balanced" else Sequential)(max_memory=cards).device_map(subject)


def with_the_rest(limits: Mapping[int | str, int]) -> dict[int | str, int]:
    """Return limits with what is free of the GPUs and the host that they do not name, which accelerate would not use."""
    return {**get_max_memory(), **limits}


def _limits(max_memory: Mapping[int | str, int] | None) -> dict[int | str, int] | None:
    return None if max_memory is None else dict(max_memory)


def _unsplit(subject: Subject) -> list[str]:
    return sorted({type(block).__name__ for block in subject.blocks})


def _footprint(subject: Subject, device_map: DeviceMap) -> Footprint:
    totals = {place: sum(sizes) for place, sizes in shares(subject, device_map).items()}
    host, disk = totals.pop("cpu", 0), totals.pop("disk", 0)
    locked = 0
    if visits_a_card(device_map):
        on_host = [(name, tensor) for name, tensor, place in placed_tensors(subject, device_map) if place == "cpu"]
        host, locked = 0, sum(whole_pages(layout.num_bytes) for layout in _by_block(subject, on_host))
    devices = {name: Bytes(size) for name, size in totals.items()}
    return Footprint(devices=devices, host=Bytes(host), page_locked=Bytes(locked), disk=Bytes(disk))


def _by_block(subject: Subject, tensors: Sequence[tuple[str, Tensor]]) -> list[BlockLayout]:
    """Lay tensors out block by block, and what is in none together."""
    owners = {id(tensor): number for number, block in enumerate(subject.blocks) for _, tensor in named_tensors(block)}
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        groups.setdefault(owners.get(id(tensor), -1), []).append((name, tensor))
    return [lay_out(group) for group in groups.values()]


def _load(subject: Subject, device_map: DeviceMap, locked: set[int]) -> tuple[dict[str, Tensor], dict[str, dict[str, str]]]:
    """Give meta tensors their values where they belong; return what accelerate brings from host memory and from disk.

    ``locked`` gets the addresses of memory that is page-locked for it.
    """
    on_host: list[tuple[str, Tensor]] = []
    on_disk: dict[str, dict[str, str]] = {}
    for name, tensor, place in placed_tensors(subject, device_map):
        if device_of(name, device_map) == "disk" and isinstance(tensor, nn.Parameter):
            if not tensor.is_meta or subject.read is None:
                raise UsageError("Only a model that is not loaded yet can have parts on disk.", fix="Point to its files.")
            entry = subject.locate(name) if subject.locate is not None else None
            if entry is not None:
                on_disk[name] = {"safetensors_file": str(entry.file), "weight_name": entry.name}
        if place == "cpu":
            on_host.append((name, tensor))
        elif place != "disk" and tensor.is_meta:
            assert subject.read is not None
            bind(tensor, subject.read(name).to(torch.device(device_name(place))))
    device = torch.device(device_name(main_device(device_map)))
    return _kept_on_host(subject, on_host, device, locked), on_disk


def _kept_on_host(
    subject: Subject, tensors: Sequence[tuple[str, Tensor]], device: torch.device, locked: set[int]
) -> dict[str, Tensor]:
    """Give tensors their values in host memory, page-locked if they visit a card: from there they come at the bus's speed."""
    found: dict[str, Tensor] = {}
    budget = HostBudget()
    for layout in _by_block(subject, tensors):
        flat = allocate_host(layout.num_bytes, device, budget) if device.type == "cuda" else None
        if flat is not None:
            locked.add(flat.untyped_storage().data_ptr())
        for member in layout.members:
            value = member.tensor.data
            if value.is_meta:
                assert subject.read is not None
                value = subject.read(member.name)
            if flat is not None:
                value = member.view(flat).copy_(value)
            bind(member.tensor, value)
            found[member.name] = value
    return found


def _split_modules(model: nn.Module, device_map: DeviceMap) -> DeviceMap:
    """Return the modules within the model that a map without overlaps has in parts, with the place of their own tensors.

    Accelerate brings nothing to these; for the model itself it does.
    """
    modules = dict(model.named_modules())
    own = {name.rpartition(".")[0]: place for name, place in device_map.items() if name not in modules}
    return {name: place for name, place in own.items() if name}


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep to ourselves what accelerate says about maps that are as they should be."""
    logger = logging.getLogger("accelerate.big_modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)  # of weights that are where the map says
    try:
        with warnings.catch_warnings():  # of parameters that the map names, which are no modules
            warnings.filterwarnings("ignore", message="The following device_map keys do not match")
            warnings.filterwarnings("ignore", message="Current model requires")  # of buffers, which are small
            yield
    finally:
        logger.setLevel(level)


@torch.inference_mode(False)
def _undo(subject: Subject, locked: set[int]) -> None:
    """Take the hooks away, and have all values in ordinary memory."""
    _take_away(subject.model)
    for name, tensor in named_tensors(subject.model):
        if tensor.is_meta:
            assert subject.read is not None
            bind(tensor, subject.read(name))
        else:
            _to_ordinary_memory(tensor, locked)


def _take_away(model: nn.Module) -> None:
    """Take accelerate's hooks away."""
    remove_hook_from_submodules(model)
    for module in model.modules():  # it leaves the class's own forward behind as an attribute
        if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
            del module.forward
    for attribute in ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron", "hf_device_map"):
        model.__dict__.pop(attribute, None)


def _to_ordinary_memory(tensor: Tensor, locked: set[int]) -> None:
    """Take a tensor from a card, or from memory that is ``locked``."""
    tensor.data = tensor.data.clone() if tensor.untyped_storage().data_ptr() in locked else tensor.data.cpu()
