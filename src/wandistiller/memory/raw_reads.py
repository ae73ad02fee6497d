"""Files read as fast as the disk gives them, and not from memory: what streaming is measured against, and foreseen by."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.memory.disk_store import NUM_BUFFERS, NUM_THREADS, PIECE_BYTES, DiskStore
from wandistiller.memory.layout import Member, lay_out
from wandistiller.models.weight_files import Entry

_STRETCH_BYTES = NUM_THREADS * PIECE_BYTES


def forget_files(files: Sequence[Path], num_bytes: int = 0) -> None:
    """Drop files, or so much of the start of each, from the system's cache, where the system lets a program do that."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, num_bytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def forgetting(files: Sequence[Path], *, every: float = 0.25) -> Iterator[None]:
    """Keep dropping files from the system's cache: when they are read again they come from the disk.

    That goes on beside the reading. Dropping all at once between two rounds would be a pause that no run has; what is read
    again sooner than after ``every`` seconds is for the reader to forget.
    """
    if not files:
        yield
        return
    is_over = threading.Event()

    def forget() -> None:
        while not is_over.wait(every):
            forget_files(files)

    thread = threading.Thread(target=forget, name="wandistiller-forget", daemon=True)
    forget_files(files)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def read_files(files: Sequence[Path], *, num_threads: int = NUM_THREADS) -> int:
    """Read files front to back into memory that is used again and again, so many pieces at a time; return the bytes read."""
    buffers = threading.local()

    def read(file: Path, offset: int) -> int:
        if not hasattr(buffers, "memory"):
            buffers.memory = bytearray(PIECE_BYTES)
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return os.preadv(descriptor, [buffers.memory], offset)
        finally:
            os.close(descriptor)

    pieces = [(file, offset) for file in files for offset in range(0, file.stat().st_size, PIECE_BYTES)]
    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(read, *zip(*pieces, strict=True)))


def read_rate(files: Sequence[Path], *, at_most: int = 2**30, seconds: float = 1.0) -> float:
    """Return the bytes a second in which the start of files comes from their disk, by the reader that streams weights.

    After ``at_most`` bytes, or ``seconds``, no more are waited for.
    """
    entries = [entry for file in files for entry in _stretches(file)]
    layouts = [lay_out([(entry.name, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))]) for entry in entries]
    forget_files(files, at_most + NUM_BUFFERS * _STRETCH_BYTES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = DiskStore(layouts, _nothing_else, device, lambda index, member: entries[index])
    num_bytes, passed, start = 0, 1.0, time.perf_counter()
    try:
        for index in range(len(entries)):
            store.expect(range(index, len(entries)))
            store.fetch(index)
            store.fetched(index, None)
            num_bytes += entries[index].num_bytes
            passed = time.perf_counter() - start
            if num_bytes >= at_most or passed > seconds:
                break
    finally:
        store.close()
    return num_bytes / passed


def rate_of_largest(files: Sequence[Path]) -> float:
    """Return the bytes a second in which the largest of a model's files comes from its disk."""
    return read_rate([max(files, key=lambda file: file.stat().st_size)])


def _stretches(file: Path) -> list[Entry]:
    """Return a file as tensors of bytes, each as much as the reader's threads have to do."""
    size = file.stat().st_size
    sizes = {offset: min(size - offset, _STRETCH_BYTES) for offset in range(0, size, _STRETCH_BYTES)}
    return [Entry(str(offset), torch.uint8, (count,), file, offset) for offset, count in sizes.items()]


def _nothing_else(index: int, member: Member) -> Tensor:
    raise AssertionError("all of it is in the files")
