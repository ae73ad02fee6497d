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
    """Return the host's memory, or a container's share of it."""
    limit = _cgroup_value("memory.max", "memory/memory.limit_in_bytes")
    total = psutil.virtual_memory().total
    return Bytes(min(total, limit) if limit else total)


def available_host_memory() -> Bytes:
    """Return what this process may still take: of the host, and of a container's share."""
    available = psutil.virtual_memory().available
    limit = _cgroup_value("memory.max", "memory/memory.limit_in_bytes")
    used = _cgroup_value("memory.current", "memory/memory.usage_in_bytes")
    return Bytes(max(min(available, limit - used), 0) if limit and used else available)


def _cgroup_value(version_2: str, version_1: str) -> int | None:
    """Return a cgroup's number of bytes, or None where there is no cgroup or no limit."""
    for name in (version_2, version_1):
        file = Path("/sys/fs/cgroup") / name
        if file.is_file():
            text = file.read_text().strip()
            # Without a limit version 2 says "max" and version 1 a number near 2**63.
            return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None
