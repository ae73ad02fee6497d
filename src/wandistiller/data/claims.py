"""Several processes on one list of work, on one machine or on several that share a folder."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from wandistiller.terminal import Advance

CLAIM_SECONDS = 900.0
"""Age from which a claim counts as abandoned, unless it is known before that its process has ended."""
_POLL_SECONDS = 0.2


class Claims:
    """Who is encoding what, as files that only one process can make.

    They only spare double work: what is written is complete and the same whoever writes it. So a claim that seems abandoned
    may be taken over without more ado.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = f"{socket.gethostname()} {os.getpid()}"
        self._held: set[Path] = set()

    def take(self, name: str) -> bool:
        """Claim something; False if another process has it."""
        path = self._path(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and self._is_abandoned(path):
            path.unlink(missing_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self._owner)
        except FileExistsError:
            return False
        self._held.add(path)
        return True

    def release(self, name: str) -> None:
        """Give back what this process has claimed."""
        path = self._path(name)
        path.unlink(missing_ok=True)
        self._held.discard(path)

    def release_all(self) -> None:
        """Give everything back."""
        for path in self._held:
            path.unlink(missing_ok=True)
        self._held.clear()

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def _is_abandoned(self, path: Path) -> bool:
        try:
            host, _, process = path.read_text(encoding="utf-8").partition(" ")
            age = time.time() - path.stat().st_mtime
        except FileNotFoundError:  # released this moment
            return False
        if host == socket.gethostname() and process.isdigit():
            # A process of this number that died may have been followed by this one.
            is_own = int(process) == os.getpid() and path not in self._held
            if is_own or not psutil.pid_exists(int(process)):
                return True
        return age > CLAIM_SECONDS


def share(
    items: Sequence[int],
    claims: Claims,
    claim_name: Callable[[int], str],
    is_done: Callable[[int], bool],
    work: Callable[[Iterator[int]], None],
    advance: Advance,
) -> None:
    """Give ``work`` what this process could claim, again and again until nothing is left; it releases what it has finished.

    ``work`` has finished all of its claims when it returns. Only then does a process wait for others, so two never wait for
    each other.
    """
    pending = list(items)
    while pending:
        deferred: list[int] = []

        def claimed(pending: Sequence[int] = pending, deferred: list[int] = deferred) -> Iterator[int]:
            for index in pending:
                if not claims.take(claim_name(index)):
                    deferred.append(index)
                elif is_done(index):  # by another process, since the list was made
                    claims.release(claim_name(index))
                    advance()
                else:
                    yield index

        work(claimed())
        pending = deferred
        if pending:
            time.sleep(_POLL_SECONDS)
