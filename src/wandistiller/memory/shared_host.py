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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    with _locked(path.with_suffix(".lock")):  # the others wait here while the first one fills
        if not path.exists():
            remove_abandoned()
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                _reserve(file, total)
            _fill(_map(partial, total), specs, offsets, read)
            partial.rename(path)
        _hold(path)
        flat = _map(path, total)
    return {name: _piece(flat, offsets[name], spec) for name, spec in specs.items()}


def remove_abandoned() -> None:
    """Remove what jobs left that were killed: files that nobody holds and nobody is about to."""
    for path in [found for suffix in ("weights", "partial") for found in _folder().glob(f"{_prefix()}*.{suffix}")]:
        _remove_unless_held(path.with_suffix(".weights"), wait=False)


def _remove_unless_held(path: Path, *, wait: bool) -> None:
    with suppress(BlockingIOError), _locked(path.with_suffix(".lock"), wait=wait):
        if path.exists():
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for suffix in (".weights", ".partial", ".lock"):
            path.with_suffix(suffix).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of that name; without ``wait``, :class:`BlockingIOError` where somebody has it."""
    while True:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:  # else it was removed while we waited, and the name is another file's
                yield
                return


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
    paths = [Path(file.name) for file in _held]
    for file in _held:
        file.close()
    _held.clear()
    for path in paths:
        _remove_unless_held(path, wait=True)  # another rank may be looking at this very moment; the last one removes it


def _map(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _fill(flat: Tensor, specs: Mapping[str, Spec], offsets: Mapping[str, int], read: Callable[[str], Tensor]) -> None:
    for name, spec in specs.items():
        _piece(flat, offsets[name], spec).copy_(read(name))


def _piece(flat: Tensor, offset: int, spec: Spec) -> Tensor:
    shape, dtype = spec
    return flat[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
