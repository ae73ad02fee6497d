"""Threads that go through tensors in host memory piece by piece, one core each.

PyTorch's own threads share every operation and wait for each other after it. Where the cores have other work as well (launching
kernels, reading data, other ranks), each such wait lasts as long as the slowest of them takes, thousands of times a step.
Threads that take the next piece as soon as they are done with one do not wait for each other.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wandistiller.memory.shared_host import ranks_here

PIECE = 2**21
"""Numbers in a piece: few enough to stay in the cache that cores share, so many that threads seldom need the interpreter."""
_LEFT_FREE = 1
"""Cores left to what launches kernels."""

PieceWork = Callable[[int, Tensor], Any]
"""Told a piece's number, and room for ``PIECE`` float32 numbers that is the thread's own."""


class Work:
    """Pieces that belong together."""

    def __init__(self, do: PieceWork, count: int, then: Callable[[], None] | None) -> None:
        self._do = do
        self._then = then
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._left = count
        self._error: BaseException | None = None
        self._results: list[Any] = [None] * count
        self.begun = 0
        if count == 0:
            self._finish()

    @property
    def count(self) -> int:
        return len(self._results)

    def do(self, index: int, room: Tensor) -> None:
        try:
            self._results[index] = self._do(index, room)
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self._error = error
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._finish()

    def wait(self) -> list[Any]:
        """Return what the pieces gave, in their order; raise what one of them raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._results

    def _finish(self) -> None:
        """Also if a piece failed: whoever waits for what comes then would never see the error."""
        if self._then is not None:
            self._then()
        self._done.set()


class HostThreads:
    """A few threads, and work for them in an order."""

    def __init__(self, num_threads: int | None = None) -> None:
        count = num_threads or default_num_threads()
        self._waiting: list[tuple[int, int, Work]] = []
        """A heap: by order, then by age."""
        self._num_begun = 0
        self._changed = threading.Condition()
        self._is_closed = False
        before = torch.get_num_threads()
        ready = threading.Barrier(count + 1)
        self._threads = [
            threading.Thread(target=self._take_pieces, args=(ready,), name="wandistiller-host", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        ready.wait()
        # The number that each thread has set is also that of all threads to come.
        torch.set_num_threads(before)

    @property
    def count(self) -> int:
        return len(self._threads)

    def begin(self, do: PieceWork, count: int, *, order: int = 0, then: Callable[[], None] | None = None) -> Work:
        """Have pieces worked on: before all that wait with a higher ``order``, after all others.

        ``then`` is called by the thread that is the last to finish, before whoever waits goes on.
        """
        work = Work(do, count, then)
        if count:
            with self._changed:
                heapq.heappush(self._waiting, (order, self._num_begun, work))
                self._num_begun += 1
                self._changed.notify(count)
        return work

    def close(self) -> None:
        """End the threads, once everything is done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _take_pieces(self, ready: threading.Barrier) -> None:
        torch.get_num_threads()  # PyTorch gives a thread its number when it first asks
        torch.set_num_threads(1)
        ready.wait()
        room = torch.empty(PIECE)
        while (found := self._next()) is not None:
            work, index = found
            work.do(index, room)
            del work, found  # a finished one is not kept until the next comes

    def _next(self) -> tuple[Work, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            work = self._waiting[0][2]
            index = work.begun
            work.begun += 1
            if work.begun == work.count:
                heapq.heappop(self._waiting)
            return work, index


def default_num_threads() -> int:
    """Return how many of this machine's cores are a rank's for work on the host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // ranks_here() - _LEFT_FREE, 1)
