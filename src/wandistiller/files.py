"""Files that are complete or absent: nothing of this program is ever seen half-written under its final name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wandistiller.errors import OutputError


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """Give a temporary path beside ``target`` for a file or a folder; it takes the final name only if the block succeeds.

    What stood there before is replaced at that moment and kept if the block fails; what failed is removed.
    """
    # Hidden by its first character and with the suffix kept, for writers that choose the format by it.
    partial = target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}")
    former = target.with_name(f".{target.stem}.former-{os.getpid()}{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if target.is_dir():  # a folder with content cannot be renamed over
            target.rename(former)
        partial.replace(target)
    except OSError as error:
        raise OutputError(
            f"{target} could not be written.", why=str(error), fix="Free some disk space or choose another place for it."
        ) from error
    finally:
        for leftover in (partial, former):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
