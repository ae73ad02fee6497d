"""Files read as fast as the disk gives them, and not from memory: what streaming from disk is measured against."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wandistiller.memory.disk_store import NUM_THREADS, PIECE_BYTES

_ENOUGH = 2**30
_ENOUGH_SECONDS = 1.0
"""Bytes, or seconds, from which a rate is taken."""


def forget_files(files: Sequence[Path]) -> None:
    """Drop files from the system's cache, where the system lets a program do that."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_files(
    files: Sequence[Path],
    *,
    num_threads: int = NUM_THREADS,
    at_most: int | None = None,
    seconds: float = float("inf"),
) -> int:
    """Read files front to back into memory that is used again and again, so many pieces at a time; return the bytes read.

    After ``seconds`` no other piece is begun.
    """
    until = time.perf_counter() + seconds
    buffers = threading.local()

    def read(file: Path, offset: int) -> int:
        if time.perf_counter() > until:
            return 0
        if not hasattr(buffers, "memory"):
            buffers.memory = bytearray(PIECE_BYTES)
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return os.preadv(descriptor, [buffers.memory], offset)
        finally:
            os.close(descriptor)

    pieces = [(file, offset) for file in files for offset in range(0, file.stat().st_size, PIECE_BYTES)]
    if at_most is not None:
        pieces = pieces[: max(at_most // PIECE_BYTES, 1)]
    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(read, *zip(*pieces, strict=True)))


def read_rate(file: Path) -> float:
    """Return the bytes a second in which the start of a file comes from its disk."""
    forget_files([file])
    start = time.perf_counter()
    num_bytes = read_files([file], at_most=_ENOUGH, seconds=_ENOUGH_SECONDS)
    return num_bytes / (time.perf_counter() - start)
