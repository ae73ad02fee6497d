"""Placements by device map: parts of a model on several GPUs, on the CPU and on disk, through accelerate.

``balanced`` spreads the blocks evenly over the GPUs, ``sequential`` fills one after the other, ``custom`` takes a map from a
file. A map names modules, flat (``"blocks.0": "cpu"``) or nested (``[blocks] 0 = "cpu"``), and says for each a GPU's number,
``cpu`` or ``disk``. What is wrong with a map is said before anything is loaded. What is on the CPU visits the GPU when its turn
comes, from page-locked memory.
"""

from __future__ import annotations

import json
import logging
import re
import tomllib
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

from wandistiller.config.values import without_repeats
from wandistiller.errors import UsageError, nearest, shortened
from wandistiller.memory.host import HostBudget, allocate_host, whole_pages
from wandistiller.memory.layout import BlockLayout, bind, lay_out, named_tensors, unbind
from wandistiller.memory.placement import Footprint, Placed, Placement, Subject, register_placement
from wandistiller.units import Bytes

DeviceMap = dict[str, str | int]
_ELSEWHERE = ("cpu", "disk")


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
            main = _main_device(device_map)
            with _quietly():
                dispatch_model(subject.model, device_map, main, on_host or None, offload_index=index, force_hooks=True)
            for name, place in _split_modules(subject.model, device_map).items():
                add_hook_to_module(subject.model.get_submodule(name), AlignDevicesHook(_computing(place, main)))
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


def read_device_map(path: Path) -> DeviceMap:
    """Read a map from a file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_toml = path.suffix.lower() == ".toml"
        content = tomllib.loads(text) if is_toml else json.loads(text, object_pairs_hook=without_repeats)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The device map {path} cannot be read.", why=str(error), fix="Check the path; it is a JSON or TOML file."
        ) from error
    if not isinstance(content, dict):
        raise UsageError(f"The device map {path} is not a table.", fix='Write {"module": "cpu", ...}.')
    return flatten_device_map(content)


def reads_files(placement: str, device_map: Path | None) -> bool:
    """Say whether weights come from the user's files in every step."""
    return placement == "disk" or (device_map is not None and "disk" in read_device_map(device_map).values())


def flatten_device_map(content: Mapping[str, Any], prefix: str = "") -> DeviceMap:
    """Turn a nested map into one of full module names; ``""`` inside of a module is the rest of it."""
    flat: DeviceMap = {}
    for key, value in content.items():
        name = ".".join(part for part in (prefix, str(key)) if part)
        inside = flatten_device_map(value, name) if isinstance(value, Mapping) else {name: value}
        twice = [each for each in inside if each in flat and flat[each] != inside[each]]
        if twice:
            places = f"{flat[twice[0]]!r} and {inside[twice[0]]!r}"
            raise UsageError(f"The device map puts '{twice[0]}' on {places}.", fix="Name each module once, nested or flat.")
        flat |= inside
    return flat


def check_device_map(device_map: DeviceMap, model: nn.Module, num_cards: int | None = None) -> None:
    """Raise ``UsageError`` for a module that is not there, a tensor that is left out, an absent device, a part cut in two.

    ``num_cards`` is how many GPUs there are, if not those of this machine.
    """
    count = torch.cuda.device_count() if num_cards is None else num_cards
    parts = {name for name, _ in model.named_modules()} | {name for name, _ in named_tensors(model)}
    for name, device in device_map.items():
        if name not in parts:
            raise UsageError(
                f"The device map names '{name}', which this model has not{nearest(name, parts)}",
                why=f"it has {shortened(name for name, _ in model.named_children())}, and what is in them.",
                fix="Correct the name, or take it out of the map.",
            )
        if not _is_there(device, count):
            raise UsageError(
                f"The device map puts '{name}' on {device!r}, which is not there.",
                why=f"there are {count} GPU{'' if count == 1 else 's'}, cpu and disk.",
                fix="Use a GPU's number, cpu or disk.",
            )
    stored = model.state_dict().keys()
    left_out = [name for name, _ in named_tensors(model) if name in stored and _device_of(name, device_map) is None]
    if left_out:
        raise UsageError(
            f"The device map leaves out {len(left_out)} tensors: {shortened(left_out)}.",
            why="each has to be somewhere.",
            fix='Name their modules, or everything else with "".',
        )
    _check_splits(device_map, model)
    _check_shared(device_map, model)


def _check_splits(device_map: DeviceMap, model: nn.Module) -> None:
    """Raise ``UsageError`` for a module, other than the whole, whose own tensors would meet results from another device."""
    main = _main_device(device_map)
    for name, module in model.named_modules():
        if not name or not list(module.parameters(recurse=False)):
            continue
        inside = {_device_of(f"{name}.{part}", device_map) for part, _ in named_tensors(module)}
        computing = {_computing(place, main) for place in inside}
        if len(computing) > 1:
            raise UsageError(
                f"The device map lets '{name}' compute on {' and '.join(sorted(map(repr, computing)))}.",
                why=f"results of its parts meet there; what is on cpu or disk computes on {main!r}.",
                fix=f"Give all of '{name}' one device.",
            )


def _check_shared(device_map: DeviceMap, model: nn.Module) -> None:
    """Raise ``UsageError`` for a tensor that several modules have and that visits a card, or is read, for one of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    passing = _ELSEWHERE if _visits_a_card(device_map) else ("disk",)
    for together in names.values():
        place = next((place for name in together if (place := _device_of(name, device_map)) in passing), None)
        if len(together) > 1 and place is not None:
            raise UsageError(
                f"The device map puts a tensor on {place} that {' and '.join(together)} have in common.",
                why="it would be brought for one of them and be missing for the other.",
                fix=f"Put their modules on {'a GPU' if 'cpu' in passing else 'cpu'}.",
            )


def _is_there(device: str | int, count: int) -> bool:
    if device in _ELSEWHERE:
        return True
    if isinstance(device, int) and not isinstance(device, bool):
        return 0 <= device < count
    number = re.fullmatch(r"cuda(?::(\d+))?", device) if isinstance(device, str) else None
    return number is not None and int(number[1] or 0) < count


def _device_of(name: str, device_map: DeviceMap) -> str | int | None:
    """Return the device of the longest part of a name that the map has."""
    pieces = name.split(".")
    for length in range(len(pieces), -1, -1):
        part = ".".join(pieces[:length])
        if part in device_map:
            return device_map[part]
    return None


def _main_device(device_map: DeviceMap) -> str | int:
    """Return where parts compute that are in host memory or on disk: the first GPU that a map names."""
    return next((place for place in device_map.values() if place not in _ELSEWHERE), "cpu")


def _computing(place: str | int | None, main: str | int) -> str | int:
    return main if place is None or place in _ELSEWHERE else place


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


def without_overlaps(model: nn.Module, device_map: DeviceMap) -> DeviceMap:
    """Return the same map with no part inside of another, as accelerate wants it.

    The own tensors of a module that is in several places, which are few and small, stay where it computes.
    """
    result: DeviceMap = {}
    main = _main_device(device_map)

    def place_of(name: str) -> str | int:
        place = _device_of(name, device_map)
        return "cpu" if place is None else place

    def walk(name: str, module: nn.Module) -> None:
        inside = [f"{name}.{part}" if name else part for part, _ in named_tensors(module)]
        places = {place_of(part) for part in inside}
        if len(places) == 1:
            result[name] = places.pop()
            return
        for part, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = f"{name}.{part}" if name else part
            result[full] = _computing(place_of(full), main)
        for part, child in module.named_children():
            walk(f"{name}.{part}" if name else part, child)

    walk("", model)
    return result


def with_the_rest(limits: Mapping[int | str, int]) -> dict[int | str, int]:
    """Return limits with what is free of the GPUs and the host that they do not name, which accelerate would not use."""
    return {**get_max_memory(), **limits}


def _limits(max_memory: Mapping[int | str, int] | None) -> dict[int | str, int] | None:
    return None if max_memory is None else dict(max_memory)


def _unsplit(subject: Subject) -> list[str]:
    return sorted({type(block).__name__ for block in subject.blocks})


def shares(subject: Subject, device_map: DeviceMap) -> dict[str, list[int]]:
    """Return the bytes of each tensor, by the device that it is put on."""
    found: dict[str, list[int]] = {}
    for _, tensor, place in _places(subject, device_map):
        found.setdefault(_device_name(place), []).append(tensor.numel() * tensor.dtype.itemsize)
    return found


def on_disk(model: nn.Module, device_map: DeviceMap) -> list[str]:
    """Return the names of the parameters that a map has on disk."""
    return [name for name, _ in model.named_parameters() if _device_of(name, device_map) == "disk"]


def _places(subject: Subject, device_map: DeviceMap) -> Iterator[tuple[str, Tensor, str | int]]:
    """Yield every tensor with the place where it really is."""
    main = _main_device(device_map)
    for name, tensor in named_tensors(subject.model):
        place = _device_of(name, device_map)
        if not isinstance(tensor, nn.Parameter):
            place = _computing(place, main)  # accelerate keeps buffers where they compute
        elif place == "disk" and (subject.locate is None or subject.locate(name) is None):
            place = "cpu"  # it has to be converted, so it is read once and kept
        yield name, tensor, "cpu" if place is None else place


def _device_name(place: str | int) -> str:
    return f"cuda:{place}" if isinstance(place, int) else place


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


def _footprint(subject: Subject, device_map: DeviceMap) -> Footprint:
    totals = {place: sum(sizes) for place, sizes in shares(subject, device_map).items()}
    host, disk = totals.pop("cpu", 0), totals.pop("disk", 0)
    locked = 0
    if _visits_a_card(device_map):
        on_host = [(name, tensor) for name, tensor, place in _places(subject, device_map) if place == "cpu"]
        host, locked = 0, sum(whole_pages(layout.num_bytes) for layout in _by_block(subject, on_host))
    devices = {name: Bytes(size) for name, size in totals.items()}
    return Footprint(devices=devices, host=Bytes(host), page_locked=Bytes(locked), disk=Bytes(disk))


def _visits_a_card(device_map: DeviceMap) -> bool:
    """Say whether what is in host memory computes on a card."""
    return torch.device(_device_name(_main_device(device_map))).type == "cuda"


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
    for name, tensor, place in _places(subject, device_map):
        if _device_of(name, device_map) == "disk" and isinstance(tensor, nn.Parameter):
            if not tensor.is_meta or subject.read is None:
                raise UsageError("Only a model that is not loaded yet can have parts on disk.", fix="Point to its files.")
            entry = subject.locate(name) if subject.locate is not None else None
            if entry is not None:
                on_disk[name] = {"safetensors_file": str(entry.file), "weight_name": entry.name}
        if place == "cpu":
            on_host.append((name, tensor))
        elif place != "disk" and tensor.is_meta:
            assert subject.read is not None
            bind(tensor, subject.read(name).to(torch.device(_device_name(place))))
    device = torch.device(_device_name(_main_device(device_map)))
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
