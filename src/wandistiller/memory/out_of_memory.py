"""When memory runs out, of a device, of the host or of a disk: what is told, in gigabytes, and what to change.

``note_failure`` is called where the error passes a phase, while the numbers are still those of the failure. ``advising``
stands at the top of every command and turns the error into a message. Neither waits for other ranks.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from wandistiller.config.command import CommandConfig, command_line
from wandistiller.errors import OutOfRoomError, OutputError, UsageError, WanDistillerError
from wandistiller.memory.advice import Remedy, changes_of, enough, in_order
from wandistiller.units import Bytes

_DEVICE_SIGNS = ("out of memory", "_ALLOC_FAILED", "CUDA error: out of memory")
_HOST_SIGNS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_DISK_SIGNS = ("No space left on device", "Disk quota exceeded")
_SHARED_SIGNS = ("</torch_", "out of shared memory", "/dev/shm", "shared memory (shm)")
"""Of errors where processes hand each other tensors; the place is a file system in memory, often a small one in containers."""
_SHARED = Path("/dev/shm")
_ASKED = re.compile(r"(?:[Tt]ried to allocate|you tried to allocate) ([\d.]+) ?([KMGT]iB|bytes)")


_WRITTEN = ("output", "output_dir", "cache_dir", "sample_dir")
"""What commands call the places that they write to."""
_OTHERWISE = {
    "device": "close what else uses the card, or take a smaller model, picture or batch.",
    "host": "close what else runs here, or take a smaller model; wandistiller doctor shows what is free.",
    "disk": "free some room there or write elsewhere, then run the same command again; nothing half-written is left.",
    "shared": "give it more room (docker run --shm-size 8g, or mount -o remount,size=8g /dev/shm), or read without workers.",
}
_WHAT = {
    "device": "Out of GPU memory",
    "host": "Out of host memory",
    "disk": "The disk is full",
    "shared": "Out of shared memory",
}


@dataclass
class Failure:
    """Where and when memory ran out."""

    kind: str
    """device, host, disk or shared, which is what the processes of a machine hand each other tensors through"""
    asked: Bytes | None
    """What the failed request was for, where the error says it."""
    phase: str = ""
    role: str = ""
    numbers: Sequence[str] = ()
    """Lines about each device and the host, from the moment of the failure."""
    free: Bytes = field(default_factory=lambda: Bytes(0))
    in_use: Bytes = field(default_factory=lambda: Bytes(0))
    """What tensors took on the fullest device at that moment."""
    computes_on_host: bool = False
    """Whether the run is one on the CPU."""
    remedies: Sequence[Remedy] = ()
    also: dict[str, Any] = field(default_factory=dict)
    """What else the command to paste has to change, such as to go on where the run has saved its state."""

    @property
    def is_foreseen(self) -> bool:
        """Whether estimates tell what flags would save of it."""
        return self.kind in ("device", "host")

    @property
    def is_computing(self) -> bool:
        """Whether what ran out is the memory that the run computes in."""
        return self.kind == "device" or (self.kind == "host" and self.computes_on_host)


def classify(error: BaseException) -> Failure | None:
    """Say what ran out; None for any other error."""
    while isinstance(error, OutputError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = str(error)
    asked = _ASKED.search(text)
    size = Bytes.parse(f"{asked[1]}{'' if asked[2] == 'bytes' else asked[2]}") if asked else None
    if isinstance(error, torch.OutOfMemoryError):
        return Failure("device", size)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        is_shared = str(error.filename).startswith(f"{_SHARED}/") if error.filename else _is_of_multiprocessing(error)
        return Failure("shared" if is_shared else "disk", None)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return Failure("host", size)
    # What another rank could not write arrives from there as its text alone.
    if isinstance(error, OutputError) or not isinstance(error, WanDistillerError):
        if isinstance(error, RuntimeError) and _has_no_shared_memory(text):
            return Failure("shared", None)
        if any(sign in text for sign in _DISK_SIGNS) and isinstance(error, Exception):
            return Failure("disk", None)
        if isinstance(error, RuntimeError) and any(sign in text for sign in _HOST_SIGNS):
            return Failure("host", size)
        if isinstance(error, RuntimeError) and any(sign in text for sign in _DEVICE_SIGNS):
            return Failure("device", size)
    return None


def _is_of_multiprocessing(error: OSError) -> bool:
    """Say whether an error comes from making locks and queues for processes, which are in shared memory."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].partition(".")[0] == "multiprocessing"


def _has_no_shared_memory(text: str) -> bool:
    is_full = any(sign in text for sign in (*_DISK_SIGNS, "Bus error", "insufficient shared memory"))
    return is_full and any(sign in text for sign in _SHARED_SIGNS)


def note_failure(error: BaseException, complete: Callable[[Failure], None]) -> None:
    """Write onto an error where it happened and what would help, once: the innermost phase knows best."""
    failure = classify(error)
    if failure is not None and not hasattr(error, "_wandistiller_failure"):
        failure.role = getattr(error, "_wandistiller_role", "")
        complete(failure)
        error._wandistiller_failure = failure  # type: ignore[attr-defined]


@contextmanager
def working_with(role: str) -> Iterator[None]:
    """Let an error that passes say which role's model was at work, in a phase that has several."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "_wandistiller_role"):
            error._wandistiller_role = role  # type: ignore[attr-defined]
        raise


@contextmanager
def advising(command: str, config: CommandConfig) -> Iterator[None]:
    """Turn what means "out of memory" into a message with advice; let everything else through."""
    try:
        yield
    except BaseException as error:
        failure = getattr(error, "_wandistiller_failure", None) or classify(error)
        if failure is None:
            raise
        raise describe(failure, command, config, error) from error


def describe(failure: Failure, command: str, config: CommandConfig, error: BaseException) -> OutOfRoomError:
    """Return the message: what ran out where, the numbers, the remedies, and a command line to paste."""
    what = _WHAT[failure.kind]
    if failure.phase:
        what += f" while {failure.phase}"
    if failure.role:
        what += f", role {failure.role}"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        what += f", rank {os.environ.get('RANK', '?')} of {world}"
    why = list(failure.numbers)
    if not failure.is_foreseen:
        places = [_SHARED] if failure.kind == "shared" else _written_places(error, config)
        why = [f"{room}{', without what was being written' if failure.kind == 'disk' else ''}" for room in _room_in(places)]
    if failure.asked is not None:
        why.append(f"{failure.asked} more were asked for")
    remedies = in_order(failure.remedies)
    shortage = max((failure.asked or 0) - failure.free, 0)
    lines = [f"    {remedy}" for remedy in remedies]
    if remedies:
        chosen = enough(remedies, shortage, lambda changes: _is_possible(replace(config, **changes)))
        changes = {**failure.also, **changes_of(chosen)}
        if sum(remedy.saves for remedy in chosen) < shortage:
            short = f"{Bytes(shortage)} are short, which these do not free together"
            lines.append(f"    {short}: {_OTHERWISE[failure.kind]}")
        fix = "\n".join(["most memory for the least time first:", *lines, "  run: " + command_line(command, config, changes)])
    else:
        fix = _OTHERWISE[failure.kind][0].upper() + _OTHERWISE[failure.kind][1:]
        changes = dict(failure.also)
        if failure.kind == "shared" and getattr(config, "workers", None):
            changes["workers"] = 0
        if changes:
            fix += f"\n  {'' if 'workers' in changes else 'then '}run: " + command_line(command, config, changes)
    return OutOfRoomError(what + ".", why="; ".join(why), fix=fix)


def _is_possible(config: CommandConfig) -> bool:
    try:
        config.check()
    except UsageError:
        return False
    return True


def _written_places(error: BaseException, config: CommandConfig) -> list[Path]:
    """Return the place that was written to, or, as not every error names it, each that the command writes to."""
    names = [getattr(each, "filename", None) for each in (error, error.__cause__) if each is not None]
    return [Path(name) for name in names if name] or [
        value for name in _WRITTEN if isinstance(value := getattr(config, name, None), Path)
    ]


def _room_in(places: Sequence[Path]) -> list[str]:
    """Say how full the file systems are."""
    folders = {next((parent for parent in (place, *place.parents) if parent.is_dir()), Path()): None for place in places}
    found = []
    for folder in folders:
        usage = shutil.disk_usage(folder)
        found.append(f"{folder} has {Bytes(usage.free)} free of {Bytes(usage.total)}")
    return found
