"""Host memory that all ranks of one machine have in common: the first fills it, the others map it.

It is a file in shared memory, under the name of the job. Every rank holds a lock on it for as long as it lives, so that a file
whose job was killed is recognised and removed by the next one.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from wandistiller.errors import UsageError
from wandistiller.memory.layout import align
from wandistiller.units import Bytes

Spec = tuple[torch.Size, torch.dtype]
_held: list[IO[bytes]] = []


def ranks_here() -> int:
    """Return how many ranks this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share(key: str, specs: Mapping[str, Spec], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return tensors by name that every rank of this machine with the same ``key`` shares; ``read`` is asked by one of them."""
    offsets, total = {}, 0
    for name, (shape, dtype) in specs.items():
        offsets[name], total = total, align(total + shape.numel() * dtype.itemsize)
    total = -(-max(total, 1) // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages, which can be locked
    path = _path(key)
    with path.with_suffix(".lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait here while the first one fills
        if not path.exists():
            remove_abandoned()
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # somebody fills it
                _reserve(file, total)
                _fill(_map(partial, total), specs, offsets, read)
                partial.rename(path)
        _hold(path)
        flat = _map(path, total)
    return {name: _piece(flat, offsets[name], spec) for name, spec in specs.items()}


def remove_abandoned() -> None:
    """Remove what jobs left that were killed: files that nobody holds."""
    for path in [found for suffix in ("weights", "partial") for found in _folder().glob(f"{_prefix()}*.{suffix}")]:
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            for suffix in (".weights", ".lock", ".partial"):
                path.with_suffix(suffix).unlink(missing_ok=True)


def _reserve(file: IO[bytes], size: int) -> None:
    """Take the room for a file now: too little of it would be a crash later."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        Path(file.name).unlink()
        if error.errno != errno.ENOSPC:
            raise
        room = shutil.disk_usage(_folder())
        raise UsageError(
            f"Shared memory ({_folder()}) has room for {Bytes(room.free)}, and {Bytes(size)} are needed.",
            why="the ranks of this machine share one copy of these weights there.",
            fix="Make it larger (Docker: --shm-size, Kubernetes: an emptyDir of medium Memory), or take another "
            "--teacher-device-strategy: disk, or sharded.",
        ) from error


def _folder() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"wandistiller-{os.getuid()}-"


def _path(key: str) -> Path:
    job = [
        os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    ]
    digest = hashlib.sha256("\0".join([*job, key]).encode()).hexdigest()[:24]
    return _folder() / f"{_prefix()}{digest}.weights"


def _hold(path: Path) -> None:
    file = path.open("rb")
    fcntl.flock(file, fcntl.LOCK_SH)
    if not _held:
        atexit.register(_release)
    _held.append(file)


def _release() -> None:
    for file in _held:
        file.close()
    _held.clear()
    remove_abandoned()


def _map(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _fill(flat: Tensor, specs: Mapping[str, Spec], offsets: Mapping[str, int], read: Callable[[str], Tensor]) -> None:
    for name, spec in specs.items():
        _piece(flat, offsets[name], spec).copy_(read(name))


def _piece(flat: Tensor, offset: int, spec: Spec) -> Tensor:
    shape, dtype = spec
    return flat[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
