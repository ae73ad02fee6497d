"""Text embeddings by what they are the embeddings of, in files of many: for sets of prompts too large for a file each.

A shard is a safetensors file with the embeddings of its texts one after the other, without padding (``embeddings``), the end
of each (``ends``) and its text's hash (``keys``). A shard is never changed. Whoever writes at the same time, the worst that can
happen is that two shards have the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wandistiller.errors import CheckpointError
from wandistiller.models.text import MAX_TEXT_TOKENS
from wandistiller.models.weight_files import Planned, SafetensorsWeights, write_safetensors

KEY_BYTES = 16
Keys = NDArray[np.bytes_]
"""Hashes of texts, one an element."""

_SUFFIX = ".safetensors"


def key_of(text: str) -> bytes:
    """Return what stands for a text."""
    return hashlib.sha256(text.encode()).digest()[:KEY_BYTES]


def make_keys(keys: Sequence[bytes]) -> Keys:
    """Return keys as an array that can be sorted and searched."""
    return np.frombuffer(b"".join(keys), dtype=f"S{KEY_BYTES}")


@dataclass(frozen=True)
class BadShard:
    """A file that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class _Shard:
    path: Path
    dtype: torch.dtype
    width: int
    offset: int
    """Where in the file the embeddings begin."""
    keys: Keys
    ends: NDArray[np.int64]


class TextShards:
    """The shards of one folder, all by one text encoder in one precision."""

    def __init__(self, folder: Path, *, encoder: str, dtype: torch.dtype) -> None:
        """``encoder`` is what ``fingerprint_text_encoder`` gives."""
        self.folder = folder
        self._required = {"encoder": encoder, "dtype": str(dtype).removeprefix("torch.")}
        self._shards: list[_Shard] = []
        self._known: set[str] = set()
        # All keys in their order, and for each the number of its shard and its place in it.
        self._keys: Keys = make_keys([])
        self._places = np.zeros((0, 2), np.int64)

    def refresh(self) -> list[BadShard]:
        """Look for shards that have been written since; return those that cannot be used."""
        new, bad = [], []
        files = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        for path in files:
            if path.suffix == _SUFFIX and not path.name.startswith(".") and path.name not in self._known:
                try:
                    new.append(self._open(path))
                except CheckpointError as error:
                    bad.append(BadShard(path, error.why or error.what))
        self._add(new)
        return bad

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Say which of the texts are there."""
        if not len(self._keys):
            return np.zeros(len(keys), np.bool_)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        found: NDArray[np.bool_] = self._keys[places] == keys
        return found

    def read(self, key: bytes) -> Tensor | None:
        """Return a text's embeddings (tokens, width) as they were written, or None if they are not there."""
        wanted = make_keys([key])
        if not self.has(wanted)[0]:
            return None
        number, row = self._places[np.searchsorted(self._keys, wanted)[0]]
        shard = self._shards[number]
        start, end = int(shard.ends[row - 1]) if row else 0, int(shard.ends[row])
        row_bytes = shard.width * shard.dtype.itemsize
        content = bytearray((end - start) * row_bytes)
        try:
            with shard.path.open("rb", buffering=0) as file:
                file.seek(shard.offset + start * row_bytes)
                num_read = file.readinto(content)
        except OSError as error:
            raise CheckpointError(f"{shard.path} cannot be read.", why=str(error), fix="Start again.") from error
        if num_read != len(content):
            raise CheckpointError(f"{shard.path} has become shorter while it was in use.", fix="Start again.")
        return torch.frombuffer(content, dtype=shard.dtype).view(end - start, shard.width)

    def write(self, keys: Sequence[bytes], embeddings: Sequence[Tensor]) -> None:
        """Write one shard with the embeddings (tokens, width) of texts, and wait for the disk."""
        ends = torch.tensor([len(each) for each in embeddings]).cumsum(0)
        shape = (int(ends[-1]), embeddings[0].shape[-1])
        raw_keys = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, KEY_BYTES)
        planned = [
            Planned("embeddings", embeddings[0].dtype, shape, lambda: torch.cat(list(embeddings))),
            Planned("ends", ends.dtype, tuple(ends.shape), lambda: ends),
            Planned("keys", raw_keys.dtype, tuple(raw_keys.shape), lambda: raw_keys),
        ]
        # By its content, so that two who write the same write it once.
        path = self.folder / f"{hashlib.sha256(b''.join(keys)).hexdigest()[:32]}{_SUFFIX}"
        write_safetensors(path, planned, self._required)
        if path.name not in self._known:
            self._add([self._open(path)])

    def _open(self, path: Path) -> _Shard:
        weights = SafetensorsWeights(path, [path])
        for field, value in self._required.items():
            if weights.metadata.get(field) != value:
                raise CheckpointError(f"{path} is of another text encoder or precision.")
        entries = weights.entries
        if entries.keys() != {"embeddings", "ends", "keys"}:
            raise CheckpointError(f"{path} is not a file of text embeddings.")
        embeddings, ends, keys = entries["embeddings"], weights.read("ends").numpy(), weights.read("keys").numpy()
        lengths = np.diff(ends, prepend=0)
        is_sound = keys.shape == (len(ends), KEY_BYTES) and len(embeddings.shape) == 2 and len(ends) > 0
        if not is_sound or ends[-1] != embeddings.shape[0] or lengths.min() < 1 or lengths.max() > MAX_TEXT_TOKENS:
            raise CheckpointError(f"{path} is damaged.", why="its tables do not fit each other.")
        table = np.frombuffer(keys.tobytes(), dtype=f"S{KEY_BYTES}")
        return _Shard(path, embeddings.dtype, embeddings.shape[1], embeddings.offset, table, ends)

    def _add(self, new: Sequence[_Shard]) -> None:
        if not new:
            return
        places = [
            np.stack([np.full(len(shard.keys), number), np.arange(len(shard.keys))], axis=1)
            for number, shard in enumerate(new, start=len(self._shards))
        ]
        keys = np.concatenate([self._keys, *(shard.keys for shard in new)])
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._places = np.concatenate([self._places, *places])[order]
        self._shards += new
        self._known |= {shard.path.name for shard in new}
