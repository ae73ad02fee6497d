"""How much memory is in use now, on a device and on the host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from wandistiller.units import Bytes


@dataclass(frozen=True)
class DeviceMemory:
    """One device's memory: what this process has allocated, holds, and held at most; what is free of the total."""

    allocated: Bytes
    reserved: Bytes
    peak: Bytes
    free: Bytes
    total: Bytes


def device_memory(device: torch.device) -> DeviceMemory:
    """Read a device's memory; on the CPU, this process's and the host's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(
            allocated=Bytes(torch.cuda.memory_allocated(device)),
            reserved=Bytes(torch.cuda.memory_reserved(device)),
            peak=Bytes(torch.cuda.max_memory_allocated(device)),
            free=Bytes(free),
            total=Bytes(total),
        )
    if device.type == "mps":
        allocated, total = torch.mps.current_allocated_memory(), torch.mps.recommended_max_memory()
        held = torch.mps.driver_allocated_memory()
        return DeviceMemory(Bytes(allocated), Bytes(held), Bytes(held), Bytes(max(total - held, 0)), Bytes(total))
    used = psutil.Process().memory_info().rss
    return DeviceMemory(Bytes(used), Bytes(used), Bytes(used), available_host_memory(), total_host_memory())


def memory_line(device: torch.device) -> str:
    """Return the end of a progress line, such as ``GPU: 14.2GB``."""
    name = {"cuda": "GPU", "mps": "GPU"}.get(device.type, "RAM")
    return f"{name}: {device_memory(device).allocated / 1e9:.1f}GB"


def total_host_memory() -> Bytes:
    """Return the host's memory, or a container's or job's share of it."""
    return Bytes(min([psutil.virtual_memory().total, *(limit for limit, _ in _cgroup_limits())]))


def available_host_memory() -> Bytes:
    """Return what this process may still take: of the host, and of every share that it is part of."""
    left = (limit - used for limit, used in _cgroup_limits())
    return Bytes(max(min([psutil.virtual_memory().available, *left]), 0))


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
