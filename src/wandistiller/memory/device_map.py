"""Device maps: which part of a model is on which GPU, on the CPU or on disk.

A map names modules, flat (``"blocks.0": "cpu"``) or nested (``[blocks] 0 = "cpu"``), and says for each a GPU's number,
``cpu`` or ``disk``. What is wrong with a map is said before anything is loaded.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.config.values import without_repeats
from wandistiller.errors import UsageError, nearest, shortened
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.placement import Subject

DeviceMap = dict[str, str | int]
_ELSEWHERE = ("cpu", "disk")


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
    left_out = [name for name, _ in named_tensors(model) if name in stored and device_of(name, device_map) is None]
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
    main = main_device(device_map)
    for name, module in model.named_modules():
        if not name or not list(module.parameters(recurse=False)):
            continue
        inside = {device_of(f"{name}.{part}", device_map) for part, _ in named_tensors(module)}
        computing = {computing_device(place, main) for place in inside}
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
    passing = _ELSEWHERE if visits_a_card(device_map) else ("disk",)
    for together in names.values():
        place = next((place for name in together if (place := device_of(name, device_map)) in passing), None)
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


def without_overlaps(model: nn.Module, device_map: DeviceMap) -> DeviceMap:
    """Return the same map with no part inside of another, as accelerate wants it.

    The own tensors of a module that is in several places, which are few and small, stay where it computes.
    """
    result: DeviceMap = {}
    main = main_device(device_map)

    def place_of(name: str) -> str | int:
        place = device_of(name, device_map)
        return "cpu" if place is None else place

    def walk(name: str, module: nn.Module) -> None:
        inside = [f"{name}.{part}" if name else part for part, _ in named_tensors(module)]
        places = {place_of(part) for part in inside}
        if len(places) == 1:
            result[name] = places.pop()
            return
        for part, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = f"{name}.{part}" if name else part
            result[full] = computing_device(place_of(full), main)
        for part, child in module.named_children():
            walk(f"{name}.{part}" if name else part, child)

    walk("", model)
    return result


def shares(subject: Subject, device_map: DeviceMap) -> dict[str, list[int]]:
    """Return the bytes of each tensor, by the device that it is put on."""
    found: dict[str, list[int]] = {}
    for _, tensor, place in placed_tensors(subject, device_map):
        found.setdefault(device_name(place), []).append(tensor.numel() * tensor.dtype.itemsize)
    return found


def on_disk(model: nn.Module, device_map: DeviceMap) -> list[str]:
    """Return the names of the parameters that a map has on disk."""
    return [name for name, _ in model.named_parameters() if device_of(name, device_map) == "disk"]


def placed_tensors(subject: Subject, device_map: DeviceMap) -> Iterator[tuple[str, Tensor, str | int]]:
    """Yield every tensor with the place where it really is."""
    main = main_device(device_map)
    for name, tensor in named_tensors(subject.model):
        place = device_of(name, device_map)
        if not isinstance(tensor, nn.Parameter):
            place = computing_device(place, main)  # accelerate keeps buffers where they compute
        elif place == "disk" and (subject.locate is None or subject.locate(name) is None):
            place = "cpu"  # it has to be converted, so it is read once and kept
        yield name, tensor, "cpu" if place is None else place


def visits_a_card(device_map: DeviceMap) -> bool:
    """Say whether what is in host memory computes on a card."""
    return torch.device(device_name(main_device(device_map))).type == "cuda"


def device_of(name: str, device_map: DeviceMap) -> str | int | None:
    """Return the device of the longest part of a name that the map has."""
    pieces = name.split(".")
    for length in range(len(pieces), -1, -1):
        part = ".".join(pieces[:length])
        if part in device_map:
            return device_map[part]
    return None


def main_device(device_map: DeviceMap) -> str | int:
    """Return where parts compute that are in host memory or on disk: the first GPU that a map names."""
    return next((place for place in device_map.values() if place not in _ELSEWHERE), "cpu")


def computing_device(place: str | int | None, main: str | int) -> str | int:
    return main if place is None or place in _ELSEWHERE else place


def device_name(place: str | int) -> str:
    return f"cuda:{place}" if isinstance(place, int) else place
