"""Host memory and the limits on it: the machine's, and those of every container or job around this process."""

from __future__ import annotations

import functools
from pathlib import Path

import psutil

from wandistiller.units import Bytes


def total_host_memory() -> Bytes:
    """Return the host's memory, or a container's or job's share of it."""
    return Bytes(min([psutil.virtual_memory().total, *(limit for limit, _ in _cgroup_limits())]))


def available_host_memory() -> Bytes:
    """Return what this process may still take: of the host, and of every share that it is part of."""
    left = (limit - used for limit, used in _cgroup_limits())
    return Bytes(max(min([psutil.virtual_memory().available, *left]), 0))


def peak_of_process() -> Bytes:
    """Return the most that this process has had since ``forget_peak_of_process``; 0 where the system does not tell."""
    if not _forgets_peaks():
        return Bytes(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return Bytes(next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0))


def forget_peak_of_process() -> None:
    """Let the peak be what is there now."""
    if _forgets_peaks():
        _FORGET.write_text("5")


_FORGET = Path("/proc/self/clear_refs")


@functools.cache
def _forgets_peaks() -> bool:
    """Say whether this is a Linux that lets a process forget its peak, which not every container does."""
    try:
        _FORGET.write_text("5")
    except OSError:
        return False
    return True


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return limit and use in bytes of each cgroup around this process that has a limit, its own first."""
    found = []
    for names, group in _cgroups():
        # What is set on a parent counts for all below it.
        for folder in (group, *group.parents):
            files = [folder / name for name in names]
            if all(file.is_file() for file in files):
                limit, used = (file.read_text().strip() for file in files)
                # Without a limit version 2 says "max" and version 1 a number near 2**63.
                if limit.isdigit() and int(limit) < 2**60:
                    found.append((int(limit), int(used)))
    return found


def _cgroups() -> list[tuple[tuple[str, str], Path]]:
    """Return this process's memory cgroups: names of the files for limit and use, and the folder to begin at."""
    root, own = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    groups = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            groups.append((("memory.max", "memory.current"), root / path.lstrip("/")))
        elif "memory" in controllers.split(","):
            groups.append((("memory.limit_in_bytes", "memory.usage_in_bytes"), root / "memory" / path.lstrip("/")))
    return groups
