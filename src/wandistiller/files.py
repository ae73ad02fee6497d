"""Files that are complete or absent: nothing of this program is ever seen half-written under its final name."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from wandistiller.errors import OutputError, UsageError

_ADVICE = {
    errno.ENOSPC: "Free some disk space or choose another place for it.",
    errno.EDQUOT: "Free some of your quota or choose another place for it.",
}


def expand_home(path: str | Path) -> Path:
    """Return a path with the user's folder for ``~``; a name that only begins so, ``~a.png``, stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # there is no user of that name
        return Path(path)


@contextmanager
def complete_or_absent(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give a temporary path beside ``target`` for a file or a folder; it takes the final name only if the block succeeds.

    What stood there before is replaced at that moment, a file by a file and a folder by a folder, and kept if the block fails;
    what failed is removed. ``durable`` waits for the disk, so that a power cut does not leave a named file without content;
    thousands of small files that can be made again do without.
    """
    target = target.absolute() if target.name else target.resolve()  # "." has no name to be renamed to
    partial, former = (target.with_name(name) for name in _hidden_names(target, str(os.getpid())))
    _find_folder(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        _rename(partial, target, former, durable)
    except OSError as error:
        raise _could_not_write(target, error) from error
    finally:
        for leftover in (partial, former):
            _remove(leftover)


def _hidden_names(target: Path, process: str) -> tuple[str, str]:
    """Return what is written, and what is about to be replaced, by a process, beside a target."""
    # Hidden by its first character and with the suffix kept, for writers that choose the format by it.
    return f".{target.stem}.partial-{process}{target.suffix}", f".{target.stem}.former-{process}{target.suffix}"


def _sweep_killed(target: Path) -> None:
    """Remove what processes that were killed have left beside a target; nobody may be writing it now."""
    partials, formers = _hidden_names(target, "*")
    for former in target.parent.glob(formers):
        if target.exists():
            _remove(former)
        else:  # it was killed between two names
            former.rename(target)
    for partial in target.parent.glob(partials):
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish_folder(partial: Path, target: Path) -> None:
    """Give a folder that several processes have written its final name, once all of it is on the disk."""
    former = target.with_name(f".{target.name}.former")
    try:
        _rename(partial, target, former, durable=True)
    except OSError as error:
        raise _could_not_write(target, error) from error
    finally:
        shutil.rmtree(former, ignore_errors=True)


def _rename(partial: Path, target: Path, former: Path, durable: bool) -> None:
    if target.exists() and target.is_dir() != partial.is_dir():
        raise OutputError(f"{target} is in the way.", why="a folder is never replaced by a file, nor a file by a folder.")
    for path in [*partial.rglob("*"), partial] if durable else ():
        _flush(path)
    if target.is_dir():  # a folder with content cannot be renamed over
        target.rename(former)
    partial.replace(target)
    if durable:
        _flush(target.parent)


def _could_not_write(target: Path, error: OSError) -> OutputError:
    advice = _ADVICE.get(error.errno or 0, "Choose another place for it.")
    return OutputError(f"{target} could not be written.", why=str(error), fix=advice)


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def only_writer(folder: Path, results: Collection[str] = ()) -> Iterator[None]:
    """Keep other processes from writing to a folder that this one makes or goes on with, as far as its file system can.

    The lock is the system's and ends with the process, however that ends; processes that this one starts do not have it.
    ``results`` are what only the one with the lock writes there, with ``complete_or_absent``: what lies there half-written is
    of one that was killed, and is removed. Without locks it stays, for another process might be at it.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    file = _lock(folder / ".lock")
    try:
        for name in results if file is not None else ():
            _sweep_killed(folder / name)
        yield
    finally:
        if file is not None:
            (folder / ".lock").unlink(missing_ok=True)
            os.close(file)
        if is_new:
            with suppress(OSError):  # there is something in it, as there should be
                folder.rmdir()


def _lock(path: Path) -> int | None:
    """Return the open file whose lock this process has; None where there are no locks."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return None
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(file, 200).decode(errors="replace")
            os.close(file)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return None
            raise UsageError(
                f"{path.parent} is being written to by {holder or 'another process'}.",
                why="two trainings in one folder would destroy each other's states.",
                fix="Wait for it to end, or give another --output-dir.",
            ) from error
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return file
        os.close(file)  # the one that had it has just ended, and removed it


def check_can_write(target: Path) -> None:
    """Raise ``UsageError`` if a file or folder could not be made there; leaves nothing behind."""
    folder = _find_folder(target)
    try:
        # Permissions alone do not tell: nobody can make a folder in /proc, and root seems to be allowed to.
        with TemporaryDirectory(prefix=".trial-", dir=folder):
            pass
    except OSError as error:
        why = f"nothing can be made in {folder}: {error.strerror}."
        raise UsageError(f"{target} cannot be written.", why=why, fix="Choose another place for it.") from error


def _find_folder(target: Path) -> Path:
    """Return the folder that the first of what has to be made for a target would be in; it has to be writable."""
    folder = target.absolute().parent
    while not folder.exists() and not folder.is_symlink():
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{target} cannot be written.", why=f"{folder} is not a folder.", fix="Choose another place for it.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{target} cannot be written.", why=f"{folder} is not writable.", fix="Choose another place for it.")
    return folder
