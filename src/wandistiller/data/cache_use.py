"""Who uses a cache folder, and with what: jobs of other sizes or models would overwrite each other's files.

Files of a cache have the names of the media and nothing else, so a folder holds what one set of models and sizes has made.
Every process says what its own is, in a locked file of ``.in-use``, for as long as it fills or reads the cache. The locks are
the system's and end with the process, however that ends. Where nothing can be written, or where there are no locks, nobody is
kept out.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from wandistiller.errors import UsageError

Making = Mapping[str, str | None]
"""What a cache is made with, by what a message calls it; None takes any."""


@contextmanager
def using_cache(folder: Path, making: Making) -> Iterator[None]:
    """Keep jobs that make their cache otherwise out of a folder; raise ``UsageError`` if one of them is there already."""
    users = folder / ".in-use"
    mine = _enter(users, making)
    try:
        yield
    finally:
        if mine is not None:
            _leave(users, mine)


class _LockedFile:
    """A file that this process has locked; workers that it forks use the cache as well, and have the lock with it."""

    def __init__(self, path: Path) -> None:
        """Wait for the lock; raise ``OSError`` or ``ImportError`` where there are none."""
        import fcntl

        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError:
            os.close(self._file)
            raise

    @property
    def is_in_place(self) -> bool:
        """Whether the file still has its name."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            return False

    def write(self, text: str) -> None:
        os.write(self._file, text.encode())

    def unlock(self) -> None:
        """End the lock, also that of workers which have not ended yet."""
        import fcntl

        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)

    def remove(self) -> None:
        """Remove the file and end its lock."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.unlock()


def _enter(users: Path, making: Making) -> _LockedFile | None:
    """Return the file that says what this process uses the cache with; None where there are no locks."""
    try:
        users.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(users):  # of two jobs that do not agree, one sees the other
            _refuse_others(users, making)
            mine = _LockedFile(users / f"{uuid.uuid4().hex}.json")
            try:
                mine.write(json.dumps({"user": f"process {os.getpid()} on {socket.gethostname()}", "making": dict(making)}))
            except OSError:
                mine.remove()
                raise
            return mine
    except (OSError, ImportError):
        return None


def _leave(users: Path, mine: _LockedFile) -> None:
    try:
        with _one_at_a_time(users):
            mine.remove()
    except OSError:  # the folder is gone, or no longer writable
        mine.remove()


@contextmanager
def _one_at_a_time(users: Path) -> Iterator[None]:
    """Let one process look who uses a cache, join them or leave; the last one leaves no file behind."""
    door = _LockedFile(users / "door")
    while not door.is_in_place:  # whoever had it before was the last one
        door.unlock()
        door = _LockedFile(users / "door")
    try:
        yield
    finally:
        if any(users.glob("*.json")):
            door.unlock()
        else:
            door.remove()


def _refuse_others(users: Path, making: Making) -> None:
    """Raise ``UsageError`` for a live user whose cache is made with something else; forget those that have ended."""
    for path in users.glob("*.json"):
        if not _is_locked(path):
            with suppress(OSError):  # of somebody else, who may have the right to remove it
                path.unlink(missing_ok=True)
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name, mine in making.items() if not _agree(mine, found["making"].get(name))]
        if differing:
            raise UsageError(
                f"The cache {users.parent} is in use by {found['user']}, with other {' and other '.join(differing)}.",
                why="its files have the names of the media alone, so that the two jobs would overwrite each other's.",
                fix="Give another --cache-dir, or wait until that job has ended.",
            )


def _agree(mine: str | None, theirs: str | None) -> bool:
    return mine is None or theirs is None or mine == theirs


def _is_locked(path: Path) -> bool:
    """Say whether the process that wrote a file still uses the cache."""
    import fcntl

    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return True
        raise
    finally:
        os.close(file)
    return False
