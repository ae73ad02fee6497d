"""How much memory is in use: now, at the peak of each phase, here and by others.

A ``Monitor`` follows the phases of a run. It gives the line that ends a progress bar and the numbers for metrics, warns once
when a device is nearly full, and notes onto an error that passes by what it happened in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import psutil
import pynvml
import torch

from wandistiller import doing
from wandistiller.memory.advice import Remedy, in_order
from wandistiller.memory.host import page_locked_bytes
from wandistiller.memory.host_limits import (
    available_host_memory,
    forget_peak_of_process,
    peak_of_process,
    total_host_memory,
)
from wandistiller.memory.out_of_memory import Failure, note_failure
from wandistiller.terminal import say
from wandistiller.units import Bytes

SECONDS_FOR_ADVICE = 15.0
"""After so many no other remedy is computed."""
WARN_FROM = 0.85
"""Share of a device's memory in use from which a warning says what would help."""


@dataclass(frozen=True)
class DeviceMemory:
    """One device's memory: what this process has in use and holds, now and at most; what is free of the total."""

    allocated: Bytes
    reserved: Bytes
    peak: Bytes
    peak_reserved: Bytes
    free: Bytes
    total: Bytes

    @property
    def others(self) -> Bytes:
        """What is neither free nor held here by PyTorch: other processes, and what CUDA takes for itself."""
        return Bytes(max(self.total - self.free - self.reserved, 0))

    @property
    def share_in_use(self) -> float:
        return 1 - self.free / self.total if self.total else 0.0


def device_memory(device: torch.device) -> DeviceMemory:
    """Read a device's memory; on the CPU, this process's and the host's."""
    if device.type == "cuda":
        if device.index is None:  # PyTorch's own functions do not agree on whether that is the current one
            device = torch.device("cuda", torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        # A process may be limited to a share of the card.
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return DeviceMemory(
            allocated=Bytes(torch.cuda.memory_allocated(device)),
            reserved=Bytes(reserved),
            peak=Bytes(torch.cuda.max_memory_allocated(device)),
            peak_reserved=Bytes(torch.cuda.max_memory_reserved(device)),
            free=Bytes(max(min(free, allowed - reserved), 0)),
            total=Bytes(min(total, allowed)),
        )
    if device.type == "mps":
        allocated, total = torch.mps.current_allocated_memory(), torch.mps.recommended_max_memory()
        held = Bytes(torch.mps.driver_allocated_memory())
        return DeviceMemory(Bytes(allocated), held, held, held, Bytes(max(total - held, 0)), Bytes(total))
    used = Bytes(psutil.Process().memory_info().rss)
    most = max(used, peak_of_process())
    return DeviceMemory(used, used, most, most, available_host_memory(), total_host_memory())


def memory_line(device: torch.device) -> str:
    """Return the end of a progress line, such as ``GPU: 14.2GB``."""
    return f"{_kind(device)}: {device_memory(device).allocated / 1e9:.1f}GB"


def other_processes(device: torch.device) -> Bytes | None:
    """Return what other processes hold of a CUDA device; None where the driver does not tell, as in many containers."""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    if os.getpid() not in {process.pid for process in processes}:
        return None
    return Bytes(sum(process.usedGpuMemory or 0 for process in processes if process.pid != os.getpid()))


class Monitor:
    """Memory of a run by phase, on every device that it uses and on the host."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        remedies: Callable[[Failure], Iterable[Remedy]] = lambda failure: (),
        warn: Callable[[str], None] = say,
    ) -> None:
        """Follow ``devices``; ``remedies`` computes what would help if memory ran out in a phase, ``warn`` tells the user.

        Remedies are computed one by one as they are asked for: a run that fails does not wait for all of them.
        """
        self.devices = list(devices)
        self.peaks: dict[tuple[str, str], DeviceMemory] = {}
        """The most that was seen, by phase and device."""
        self._remedies = remedies
        self._warn = warn
        self._phases: list[tuple[str, str]] = []
        self._warned: set[torch.device] = set()

    @contextmanager
    def phase(self, name: str, role: str = "") -> Iterator[None]:
        """Count what happens inside as one phase, which works with one role's model; phases may be nested."""
        self._close_phase()
        self._phases.append((name, role))
        try:
            with doing.noted(f"{name} ({role})" if role else name):
                yield
        except BaseException as error:
            note_failure(error, self._complete)
            raise
        finally:
            self._close_phase()
            self._phases.pop()

    def observe(self) -> dict[str, float]:
        """Return the numbers for metrics, in gigabytes, and warn once if a device is nearly full.

        Beside those of now there is, for each phase so far, the most that was in use on each device.
        """
        self._fold_peak()
        found = {"memory/host_gb": psutil.Process().memory_info().rss / 1e9, "memory/page_locked_gb": page_locked_bytes() / 1e9}
        for device in self.devices:
            if device.type == "cpu":
                continue
            memory = device_memory(device)
            for name in ("allocated", "reserved", "peak", "others"):
                found[f"memory/{device}/{name}_gb"] = getattr(memory, name) / 1e9
        for (phase, name), memory in self.peaks.items():
            found[f"memory/{name}/peak_in_{phase.replace(' ', '_')}_gb"] = memory.peak / 1e9
        for device in self.devices:
            self._warn_if_full(device)
        return found

    def line(self) -> str:
        """Return the end of a progress line: what is allocated on each device."""
        for device in self.devices:
            self._warn_if_full(device)
        return " ".join(memory_line(device) for device in self.devices)

    def describe(self) -> list[str]:
        """Return each device's numbers, and the host's, as one sees them in a message."""
        lines = []
        for device in self.devices:
            memory = device_memory(device)
            if device.type == "cpu":
                continue
            others = other_processes(device) if device.type == "cuda" else None
            who = "other processes and CUDA itself" if others is None else "other processes"
            lines.append(
                f"{device} has {memory.total}, this process holds {memory.reserved} of it ({memory.allocated} in use, "
                f"{memory.peak} at the peak), {who} {memory.others if others is None else others}, {memory.free} are free"
            )
        host = device_memory(torch.device("cpu"))
        locked = f", {page_locked_bytes()} page-locked" if page_locked_bytes() else ""
        return [*lines, f"the host has {host.total}, this process holds {host.reserved}{locked}, {host.free} are free"]

    def summary(self) -> list[str]:
        """Return a line for each phase with its peaks."""
        return [f"{phase} on {device}: {memory.peak} at the peak" for (phase, device), memory in self.peaks.items()]

    def _close_phase(self) -> None:
        self._fold_peak()
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.init()  # else this fails where nothing has used the device yet
                torch.cuda.reset_peak_memory_stats(device)
            elif device.type == "cpu":
                forget_peak_of_process()

    def _fold_peak(self) -> None:
        if not self._phases:
            return
        for device in self.devices:
            memory, key = device_memory(device), (self._phases[-1][0], str(device))
            before = self.peaks.get(key, memory)
            most = {name: max(getattr(memory, name), getattr(before, name)) for name in ("peak", "peak_reserved")}
            self.peaks[key] = replace(memory, **most)

    def _complete(self, failure: Failure) -> None:
        """Fill in what is known here of a failure, real or feared."""
        failure.phase, role = self._phases[-1] if self._phases else ("", "")
        failure.role = failure.role or role
        failure.computes_on_host = all(device.type == "cpu" for device in self.devices)
        # Whatever goes wrong from here on, and where memory is short much can, is less than what is being told.
        with suppress(Exception):
            memories = [device_memory(device) for device in self.devices]
            failure.free = Bytes(min((memory.free for memory in memories), default=0))
            failure.in_use = Bytes(max((memory.allocated for memory in memories), default=0))
            failure.numbers = self.describe()
        found: list[Remedy] = []
        failure.remedies = found
        end = time.monotonic() + SECONDS_FOR_ADVICE
        with suppress(Exception):
            for remedy in self._remedies(failure):
                found.append(remedy)
                if time.monotonic() > end:
                    break

    def _warn_if_full(self, device: torch.device) -> None:
        memory = device_memory(device)
        if device in self._warned or memory.share_in_use < WARN_FROM:
            return
        self._warned.add(device)
        failure = Failure("host" if device.type == "cpu" else "device", None)
        self._complete(failure)
        helpful = [str(remedy) for remedy in in_order(failure.remedies)[:2]]
        advice = f" If it runs out: {'; or '.join(helpful)}." if helpful else ""
        self._warn(
            f"{_kind(device)} memory is {memory.share_in_use:.0%} full: {memory.free} of {memory.total} are left on {device}."
            + advice
        )


def _kind(device: torch.device) -> str:
    return "RAM" if device.type == "cpu" else "GPU"
