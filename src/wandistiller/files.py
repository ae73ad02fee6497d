"""Files that are complete or absent: nothing of this program is ever seen half-written under its final name."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wandistiller.errors import OutputError, UsageError

_ADVICE = {
    errno.ENOSPC: "Free some disk space or choose another place for it.",
    errno.EDQUOT: "Free some of your quota or choose another place for it.",
}


@contextmanager
def complete_or_absent(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give a temporary path beside ``target`` for a file or a folder; it takes the final name only if the block succeeds.

    What stood there before is replaced at that moment, a file by a file and a folder by a folder, and kept if the block fails;
    what failed is removed. ``durable`` waits for the disk, so that a power cut does not leave a named file without content;
    thousands of small files that can be made again do without.
    """
    target = target.absolute() if target.name else target.resolve()  # "." has no name to be renamed to
    # Hidden by its first character and with the suffix kept, for writers that choose the format by it.
    partial = target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}")
    former = target.with_name(f".{target.stem}.former-{os.getpid()}{target.suffix}")
    _check_access(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        _rename(partial, target, former, durable)
    except OSError as error:
        raise _could_not_write(target, error) from error
    finally:
        for leftover in (partial, former):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


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


def check_can_write(target: Path) -> None:
    """Raise ``UsageError`` if a file or folder could not be made there; leaves nothing."""
    folder = _check_access(target)
    try:
        # Permissions are not all: whoever may do everything still cannot write to /proc.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{target} cannot be written.", why=str(error), fix="Choose another place for it.") from error


def _check_access(target: Path) -> Path:
    """Return the innermost folder of a path that is there; raise ``UsageError`` if nothing may be made in it."""
    folder = target.absolute().parent
    while not folder.exists() and not folder.is_symlink():
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{target} cannot be written.", why=f"{folder} is not a folder.", fix="Choose another place for it.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{target} cannot be written.", why=f"{folder} is not writable.", fix="Choose another place for it.")
    return folder
