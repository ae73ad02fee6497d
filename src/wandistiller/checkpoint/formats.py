"""Writing one model in each format, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from wandistiller.models.stored import CONFIG_METADATA_KEY, TRANSFORMER, StoredModel, stays_in_float32
from wandistiller.models.weight_files import Planned, write_safetensors

MAX_SHARD_BYTES = 10_000_000_000
COMFYUI_PREFIX = "model.diffusion_model."

Writer = Callable[[Path, StoredModel, Mapping[str, torch.dtype], Callable[[], None]], None]
"""Writes a model to a path with the given dtype for each key, and calls the function after each tensor."""

WRITERS: dict[str, Writer] = {}


def register_format(name: str) -> Callable[[Writer], Writer]:
    """Make a writer available to ``wandistiller export`` under ``name``."""

    def register(writer: Writer) -> Writer:
        WRITERS[name] = writer
        return writer

    return register


def target_dtypes(stored: StoredModel, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtype to store each tensor in; None keeps the source's, with 8-bit weights multiplied out to bfloat16."""
    dtypes = {}
    for key, name in stored.names.items():
        if dtype is None:
            stored_in = stored.weights.entries[name].dtype
            dtypes[key] = stored_in if stored_in == stored.stored_dtype(key) else torch.bfloat16
        else:
            dtypes[key] = torch.float32 if stays_in_float32(stored.architecture.model_class, key) else dtype
    return dtypes


@register_format("diffusers")
def write_diffusers(
    folder: Path, stored: StoredModel, dtypes: Mapping[str, torch.dtype], on_tensor: Callable[[], None]
) -> None:
    """Write a folder that ``from_pretrained`` loads: config.json and safetensors, in shards of at most 10 GB."""
    planned = _plan(stored, dtypes, {key: key for key in stored.names}, on_tensor)
    write_folder(folder, stored.architecture.model_class.__name__, stored.config, planned)


def write_folder(folder: Path, class_name: str, config: Mapping[str, Any], planned: list[Planned]) -> None:
    """Write a diffusers model's folder from tensors that are loaded one at a time, those of ``into_shards`` in their order."""
    folder.mkdir(parents=True)
    content = {"_class_name": class_name, "_diffusers_version": diffusers.__version__, **config}
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shards = into_shards(planned)
    if len(shards) == 1:
        write_safetensors(folder / "diffusion_pytorch_model.safetensors", planned)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"diffusion_pytorch_model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in planned)}, "weight_map": weight_map}
    file = folder / "diffusion_pytorch_model.safetensors.index.json"
    file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@register_format("original")
def write_original(path: Path, stored: StoredModel, dtypes: Mapping[str, torch.dtype], on_tensor: Callable[[], None]) -> None:
    """Write one file with the names of the original Wan code."""
    _write_single(path, stored, dtypes, "", on_tensor)


@register_format("comfyui")
def write_comfyui(path: Path, stored: StoredModel, dtypes: Mapping[str, torch.dtype], on_tensor: Callable[[], None]) -> None:
    """Write one file as ComfyUI has them: original names, a transformer's behind its prefix."""
    _write_single(path, stored, dtypes, COMFYUI_PREFIX if stored.architecture is TRANSFORMER else "", on_tensor)


def _write_single(
    path: Path, stored: StoredModel, dtypes: Mapping[str, torch.dtype], prefix: str, on_tensor: Callable[[], None]
) -> None:
    names = stored.architecture.original_names(stored.config, stored.names)
    planned = _plan(stored, dtypes, {key: prefix + name for key, name in names.items()}, on_tensor)
    write_safetensors(path, planned, {CONFIG_METADATA_KEY: json.dumps(dict(stored.config))})


def _plan(
    stored: StoredModel, dtypes: Mapping[str, torch.dtype], names: Mapping[str, str], on_tensor: Callable[[], None]
) -> list[Planned]:
    def reader(key: str) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            on_tensor()
            return stored.read(key, dtypes[key])

        return read

    shapes = {key: stored.weights.entries[name].shape for key, name in stored.names.items()}
    return [Planned(names[key], dtypes[key], shapes[key], reader(key)) for key in stored.names]


def into_shards(planned: list[Planned]) -> list[list[Planned]]:
    """Return what goes into each file."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.num_bytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards
