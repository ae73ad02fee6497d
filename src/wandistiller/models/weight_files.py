"""Weights on disk, read and written one tensor at a time.

The safetensors library maps whole files on reading and gathers whole models on writing, and either counts against the
host memory of users whose checkpoints are larger than it. The format is a length, a JSON header and raw bytes, so here
each tensor's bytes go straight from the file into the tensor's own memory, and back.

``open_weights`` takes whatever a user points at: a safetensors file, a sharded index, a folder of shards, or a legacy
``.pth``, which is unpickled with ``weights_only=True`` or not at all. Damage is found from the headers, before any weight
is read.
"""

from __future__ import annotations

import json
import math
import mmap
import operator
import re
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller.errors import CheckpointError, OutputError, shortened
from wandistiller.files import complete_or_absent

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
_PICKLE_SUFFIXES = {".pth", ".pt", ".bin", ".ckpt"}
WEIGHT_SUFFIXES = frozenset({".safetensors", *_PICKLE_SUFFIXES})
"""How names of files with weights end."""


@dataclass(frozen=True)
class Entry:
    """One stored tensor: what it is and where its bytes lie."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Weights(ABC):
    """A set of stored tensors, whatever the container."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}

    @abstractmethod
    def read(self, name: str, *, briefly: bool = False) -> Tensor:
        """Return one tensor in host memory: its own copy, or ``briefly`` one to read from before the next is asked for."""


def scratch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for a moment, in pages of its own.

    What is freed between tensors that stay leaves holes in the heap, which can add up to half a model.
    """
    count = math.prod(shape)
    pages = mmap.mmap(-1, max(count * dtype.itemsize, 1))
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)


class SafetensorsWeights(Weights):
    """Tensors from one or more safetensors files."""

    def __init__(self, path: Path, files: Iterable[Path], expected: Mapping[str, str] | None = None) -> None:
        """Read the headers of ``files``; ``expected`` is an index's claim of which file holds which tensor."""
        super().__init__(path)
        for file in files:
            entries, metadata = _read_header(file)
            twice = self.entries.keys() & entries.keys()
            if twice:
                raise CheckpointError(
                    f"{file} repeats tensors of another shard: {shortened(sorted(twice))}.",
                    fix="Point to one checkpoint; two may have been put into one folder.",
                )
            self.entries.update(entries)
            self.metadata.update(metadata)
        if expected is not None:
            _check_index(path, self.entries, expected)

    def read(self, name: str, *, briefly: bool = False) -> Tensor:
        entry = self.entries[name]
        tensor = (scratch if briefly else torch.empty)(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a contiguous host tensor of the stored dtype and size with the stored bytes."""
        entry = self.entries[name]
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if entry.num_bytes else memoryview(b"")
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            done = 0
            while done < entry.num_bytes:
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(
                        f"{entry.file} ends inside tensor '{name}'.",
                        why="the file became shorter while it was being read.",
                        fix="Copy or download the file again.",
                    )
                done += count


class PickledWeights(Weights):
    """Tensors from a legacy PyTorch file, mapped where its format allows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:
            # PyTorch's own text goes on to recommend running the code.
            unsafe = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
            if unsafe:
                raise CheckpointError(
                    f"{path} is a pickle that would run code when opened.",
                    why=f"it calls {unsafe.group(1)}.",
                    fix="Get the safetensors version of it.",
                ) from error
            raise CheckpointError(
                f"{path} is not a readable PyTorch file.",
                why=f"{type(error).__name__} while reading it.",
                fix="Copy or download the file again; if it is safetensors, name it so.",
            ) from error
        for wrapper in ("state_dict", "model_state", "model"):
            if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
                loaded = loaded[wrapper]
        if not isinstance(loaded, dict) or not any(isinstance(value, Tensor) for value in loaded.values()):
            raise CheckpointError(f"{path} holds no dictionary of tensors.", fix="Point to a file of model weights.")
        self._tensors = {
            str(name): value for name, value in loaded.items() if isinstance(value, Tensor) and value.layout is torch.strided
        }
        self.entries = {name: Entry(name, value.dtype, tuple(value.shape), path) for name, value in self._tensors.items()}

    def read(self, name: str, *, briefly: bool = False) -> Tensor:
        tensor = self._tensors[name]
        return tensor if briefly else tensor.clone(memory_format=torch.contiguous_format)


def open_weights(path: Path) -> Weights:
    """Open a file, an index or a folder of weights; only headers are read."""
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.", fix="Check the path for a typing error.")
    if path.name.endswith(".index.json"):
        return _open_index(path)
    if path.suffix in _PICKLE_SUFFIXES:
        return PickledWeights(path)
    return SafetensorsWeights(path, [path])


def _open_folder(folder: Path) -> Weights:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _open_index(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    # The authors of Wan put a transformer's files under this name, and other models' beside them.
    files = [file for file in files if file.name.startswith("diffusion_pytorch_model")] or files
    if files and not indices:
        return SafetensorsWeights(folder, files)
    pickles = sorted(file for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if len(pickles) == 1 and not files:
        return PickledWeights(pickles[0])
    if indices or pickles:
        found = shortened(file.name for file in indices or pickles)
        raise CheckpointError(f"{folder} holds more than one set of weights: {found}.", fix="Point to the one you mean.")
    raise CheckpointError(
        f"{folder} holds no weights.", why="there is no .safetensors file in it.", fix="Point to the folder that has them."
    )


def _open_index(index: Path) -> Weights:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        expected = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} is not a shard index.", why=f"{type(error).__name__}: {error}", fix="Copy or download it again."
        ) from error
    folder = index.parent
    for file in set(expected.values()):
        # A shard has to lie in the index's own folder: anything else lets a downloaded index read the user's files.
        if Path(file).name != file or "\\" in file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{index} points outside its folder: '{file}'.",
                why="a shard's name must be a plain file name.",
                fix="Do not use this checkpoint unless you know where it comes from.",
            )
    missing = sorted(file for file in set(expected.values()) if not (folder / file).is_file())
    if missing:
        raise CheckpointError(
            f"{index} lists shards that are not there: {shortened(missing)}.", fix="Download the missing files beside it."
        )
    return SafetensorsWeights(index, [folder / file for file in sorted(set(expected.values()))], expected)


def _check_index(index: Path, entries: Mapping[str, Entry], expected: Mapping[str, str]) -> None:
    wrong = sorted(name for name, file in expected.items() if name not in entries or entries[name].file.name != file)
    if wrong:
        raise CheckpointError(
            f"{index} and its shards disagree about {len(wrong)} tensors: {shortened(wrong)}.",
            why="the shards may come from different versions.",
            fix="Download the index and all of its shards again.",
        )


def _read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged or not a safetensors file.", why=why, fix="Copy or download it again.")

    try:
        opened = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened.", why=str(error), fix="Check its permissions.") from error
    with opened as file:
        size = path.stat().st_size
        start = file.read(8)
        if len(start) < 8:
            raise damaged(f"it has only {size} bytes.")
        header_bytes = struct.unpack("<Q", start)[0]
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            if start[:2] in (b"\x80\x02", b"\x80\x04", b"PK"):
                raise CheckpointError(
                    f"{path} is a pickle with the name of a safetensors file.",
                    why="a pickle can run code when opened.",
                    fix="If you trust it, rename it to .pth; it is then read without running code.",
                )
            raise damaged(f"its header claims {header_bytes} bytes, the file has {size}.")
        raw = file.read(header_bytes)
    try:
        header: dict[str, Any] = dict(json.loads(raw).items())
        metadata = {str(key): str(value) for key, value in (header.pop("__metadata__", None) or {}).items()}
    except (ValueError, AttributeError) as error:
        raise damaged(f"its header is not JSON ({error}).") from error
    entries = {}
    data_start = 8 + header_bytes
    for name, spec in header.items():
        try:
            begin, end = map(operator.index, spec["data_offsets"])
            dtype, shape = str(spec["dtype"]), tuple(map(operator.index, spec["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"tensor '{name}' is described wrongly.") from error
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{path} stores tensor '{name}' as {dtype}, which is not supported.",
                fix=f"Use a version stored as one of {', '.join(_DTYPES)}.",
            )
        entry = Entry(name, _DTYPES[dtype], shape, path, data_start + begin)
        if end - begin != entry.num_bytes or begin < 0:
            raise damaged(f"tensor '{name}' has {end - begin} bytes for shape {shape} in {dtype}.")
        if data_start + end > size:
            raise damaged(f"it is truncated: tensor '{name}' ends at byte {data_start + end:,}, the file at {size:,}.")
        entries[name] = entry
    return entries, metadata


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its name, dtype and shape, and how to get its values when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_file_order(tensors: Iterable[Planned]) -> list[Planned]:
    """Return tensors in the order that they are loaded and written in: wide dtypes first, so that all lie aligned."""
    return sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))


def write_safetensors(
    path: Path, tensors: Iterable[Planned], metadata: Mapping[str, str] | None = None, *, durable: bool = True
) -> None:
    """Write one safetensors file, one tensor in memory at a time; it has its final name only when complete."""
    planned = in_file_order(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for tensor in planned:
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the data starts aligned
    with complete_or_absent(path, durable=durable) as partial, partial.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in planned:
            values = tensor.load().detach().to("cpu", tensor.dtype).contiguous()
            if tuple(values.shape) != tensor.shape:
                raise OutputError(f"Tensor '{tensor.name}' has shape {tuple(values.shape)}, planned was {tensor.shape}.")
            file.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()) if values.numel() else b"")
        file.flush()
