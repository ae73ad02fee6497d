"""A state's tensors in files, one for each rank that writes: the storage behind ``torch.distributed.checkpoint`` (DCP).

DCP plans who writes what, so that what several ranks have is written once and all of them write alike much, and what to read
where for tensors that are cut in another way now. Its own files are pickles; these are safetensors whose header says, of a
tensor that is a piece, where it lies in the whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from wandistiller.errors import CheckpointError
from wandistiller.models.weight_files import Planned, SafetensorsWeights, write_safetensors

ALONE = "state.safetensors"
"""The file of one process."""
_PIECES = "pieces"
"""Key in a file's header: for each tensor that is a piece, its offsets in the whole and the whole's shape."""


class StateWriter(StorageWriter):
    """Writes into a folder that ``begin`` makes and ``complete`` completes, both on the first rank alone."""

    def __init__(self, folder: Path, begin: Callable[[], None], complete: Callable[[Mapping[str, int]], None]) -> None:
        """``complete`` is told the files with their sizes, when every rank's are on the disk."""
        self._folder = folder
        self._begin = begin
        self._complete = complete

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Each writer is for one state."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is made before all ranks have planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._begin()
        count = len(plans)
        names = [f"state-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)] if count > 1 else [ALONE]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        path = self._folder / plan.storage_data
        if plan.items:
            planned = [_planned(item, planner) for item in plan.items]
            pieces = {item.index.fqn: _where(item) for item in plan.items if _is_piece(item)}
            write_safetensors(path, planned, {_PIECES: json.dumps(pieces)} if pieces else {})
        size = path.stat().st_size if plan.items else 0
        done.set_result([WriteResult(item.index, size, path.name) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._complete({result.storage_data: result.size_in_bytes for each in results for result in each})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # found by its class, never by a path


def _planned(item: WriteItem, planner: SavePlanner) -> Planned:
    data = item.tensor_data
    return Planned(item.index.fqn, data.properties.dtype, tuple(data.chunk.sizes), lambda: planner.resolve_data(item))


def _is_piece(item: WriteItem) -> bool:
    return bool(item.tensor_data.chunk.sizes != item.tensor_data.size)


def _where(item: WriteItem) -> dict[str, list[int]]:
    return {"offsets": list(item.tensor_data.chunk.offsets), "shape": list(item.tensor_data.size)}


class StateReader(StorageReader):
    """Reads pieces of tensors from files, whoever wrote them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._sources: dict[MetadataIndex, SafetensorsWeights] = {}
        self._metadata = Metadata(state_dict_metadata={})
        for file in files:
            weights = SafetensorsWeights(file, [file])
            pieces = json.loads(weights.metadata.get(_PIECES, "{}"))
            for name, entry in weights.entries.items():
                where = pieces.get(name, {"offsets": [0] * len(entry.shape), "shape": entry.shape})
                self._add(weights, name, entry.dtype, entry.shape, where)

    @property
    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every whole tensor."""
        found = self._metadata.state_dict_metadata
        return {name: (each.size, each.properties.dtype) for name, each in found.items()}

    def _add(
        self, weights: SafetensorsWeights, name: str, dtype: torch.dtype, shape: tuple[int, ...], where: Mapping[str, Any]
    ) -> None:
        size, offsets = torch.Size(where["shape"]), torch.Size(where["offsets"])
        described = self._metadata.state_dict_metadata.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
        )
        index = MetadataIndex(name, offsets)
        if described.size != size or described.properties.dtype != dtype or index in self._sources:
            raise CheckpointError(
                f"{weights.path} does not go with the files beside it: tensor '{name}' is another one there.",
                fix="Give another state, or --resume auto.",
            )
        described.chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
        self._sources[index] = weights

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Each reader is for one state."""

    def read_metadata(self, *args: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """The headers are read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        latest: tuple[MetadataIndex | None, Tensor | None] = (None, None)
        for item in plan.items:
            if latest[0] != item.storage_index:  # one at a time in memory
                latest = (item.storage_index, self._sources[item.storage_index].read(item.storage_index.fqn))
            value = latest[1]
            assert value is not None
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                value = value.narrow(dim, start, length)
            target = planner.resolve_tensor(item)
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False
