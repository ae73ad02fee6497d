"""What the caches of text embeddings and of latents have in common: a file that says what it was made from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.errors import CheckpointError
from wandistiller.models.stored import StoredModel
from wandistiller.models.weight_files import Planned, SafetensorsWeights, Weights, write_safetensors

ENCODE_FIRST = "Run wandistiller encode with the same --model, --dataset-path, size and --frames; it makes what is stale anew."

_SAMPLE_BYTES = 4096
_NUM_SHOWN = 5
_LONGEST_NAME = 238
"""Bytes of a file's name: file systems take 255, and what is half-written has up to 17 more."""


@dataclass(frozen=True)
class Requirement:
    """What a file's metadata must say, and what to tell the user if they say something else."""

    field: str
    value: str
    otherwise: str


def cache_path(folder: Path, name: str, suffix: str) -> Path:
    """Return where the file of an item is; a name that is too long for a file is cut, and its hash tells it apart."""
    above, slash, last = name.rpartition("/")
    whole = os.fsencode(last)
    if len(whole) + len(suffix) > _LONGEST_NAME:
        ending = f"-{hashlib.sha256(whole).hexdigest()[:16]}"
        last = whole[: _LONGEST_NAME - len(ending) - len(suffix)].decode(errors="ignore") + ending
    return folder / f"{above}{slash}{last}{suffix}"


class CacheFile:
    """One file of a cache: looked at by its header alone."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key

    def metadata(self) -> Mapping[str, str]:
        """Return the metadata; raise ``CheckpointError`` for a file that is absent, damaged or of another kind."""
        return self._open().metadata

    def read(self, requirements: Sequence[Requirement]) -> tuple[Tensor, Mapping[str, str]]:
        """Return the tensor and the metadata; raise ``CheckpointError`` if these are not what is required."""
        weights = self._open()
        self._check(weights.metadata, requirements)
        return weights.read(self.key), weights.metadata

    def origin(self, fields: Sequence[str]) -> str:
        """Return what some fields of the metadata say, as one string."""
        metadata = self.metadata()
        return " ".join(metadata.get(field, "") for field in fields)

    def _open(self) -> SafetensorsWeights:
        if not self.path.is_file():
            raise CheckpointError(f"{self.path} does not exist.", why="it has not been encoded yet.", fix=ENCODE_FIRST)
        weights = SafetensorsWeights(self.path, [self.path])
        if self.key not in weights.entries:
            raise CheckpointError(f"{self.path} has no tensor '{self.key}'.", fix="Remove the file, then encode again.")
        return weights

    def problem(self, requirements: Sequence[Requirement]) -> str | None:
        """Say why the file cannot be used; None if it can."""
        try:
            metadata = self.metadata()
        except CheckpointError as error:
            return error.what.rstrip(".")
        return next((f"{self.path} {each.otherwise}" for each in requirements if metadata.get(each.field) != each.value), None)

    def _check(self, metadata: Mapping[str, str], requirements: Sequence[Requirement]) -> None:
        for each in requirements:
            if metadata.get(each.field) != each.value:
                raise CheckpointError(f"{self.path} {each.otherwise}.", fix=ENCODE_FIRST)

    def write(self, values: Tensor, metadata: Mapping[str, str]) -> None:
        """Write the file; it has its name only when complete."""
        planned = Planned(self.key, values.dtype, tuple(values.shape), lambda: values)
        # There are thousands, and what a power cut spoils is seen by its header and made again.
        write_safetensors(self.path, [planned], metadata, durable=False)


def fingerprint_weights(weights: Weights, names: Mapping[str, str]) -> str:
    """Hash every tensor's name, dtype, shape and a few kilobytes from its start, middle and end.

    ``names`` has the stored name by the name that counts. Training changes all of a tensor, so pieces of each of them tell
    models apart, and ten gigabytes need not be read at every start.
    """
    digest = hashlib.sha256()
    for key, name in sorted(names.items()):
        found = weights.entries[name]
        digest.update(f"{key} {found.dtype} {found.shape}\n".encode())
        ends = max(found.num_bytes - _SAMPLE_BYTES, 0)
        if isinstance(weights, SafetensorsWeights):
            with found.file.open("rb") as file:
                for start in (0, ends // 2, ends):
                    file.seek(found.offset + start)
                    digest.update(file.read(min(_SAMPLE_BYTES, found.num_bytes)))
        else:
            content = weights.read(name).reshape(-1).view(torch.uint8)
            for start in (0, ends // 2, ends):
                digest.update(content[start : start + _SAMPLE_BYTES].numpy().tobytes())
    return digest.hexdigest()


def fingerprint_model(stored: StoredModel) -> str:
    """Return what tells a model apart from all others, whatever file and dialect it is in."""
    factors = {f"{key}.scale": name for key, name in stored.scales.items()}
    weights = fingerprint_weights(stored.weights, {**stored.names, **factors})
    config = json.dumps(dict(stored.config), sort_keys=True, default=str)
    return hashlib.sha256(f"{config} {weights}".encode()).hexdigest()


def refuse_incomplete(folder: Path, total: int, what: str, problems: Sequence[str]) -> None:
    """Raise ``CheckpointError`` if there are problems, with the first of them."""
    if problems:
        shown = "; ".join(problems[:_NUM_SHOWN])
        more = f"; and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise CheckpointError(
            f"{len(problems)} of {total} {what} in {folder} are missing or stale.", why=f"{shown}{more}.", fix=ENCODE_FIRST
        )
