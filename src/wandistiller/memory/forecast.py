"""What a run says beforehand that it will take, and at its end what it took."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from wandistiller.memory.estimates import Phase
from wandistiller.memory.hardware import Hardware, detect
from wandistiller.memory.host_limits import available_host_memory
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.raw_reads import rate_of_largest
from wandistiller.memory.shared_host import ranks_here
from wandistiller.memory.step_limit import limit_of
from wandistiller.terminal import say
from wandistiller.units import Bytes

FILE = "plan.json"


def hardware_of(device: torch.device, *, measures: bool = True) -> Hardware:
    """Return the machine as a run on this device sees it; without ``measures`` its speed is as usual."""
    if device.type != "cuda":
        return of_this_job(Hardware(card=None, num_cards=0, host_memory=available_host_memory()))
    return of_this_job(detect(measures=measures))


def of_this_job(hardware: Hardware) -> Hardware:
    """Return the machines of a job that torchrun has started, and one where it has not."""
    world_size, here = int(os.environ.get("WORLD_SIZE", "1")), ranks_here()
    if world_size == 1:
        return hardware
    cards_each = max(hardware.cards_each // here, 1)
    return replace(hardware, num_cards=here, num_nodes=max(world_size // here, 1), cards_each=cards_each)


def forecast(
    make: Callable[[Hardware], Phase], device: torch.device, *, is_whole: bool = False, files: Sequence[Path] = ()
) -> Forecast | None:
    """Return a prediction made now; a run goes on without one where that fails, and says why.

    ``files`` are those that are read in every step, whose disk is measured.
    """
    try:
        hardware = hardware_of(device)
        if files and hardware.card is not None:
            hardware = replace(hardware, disk_rate=rate_of_largest(files))
        phase = make(hardware)
        return replace(Forecast.of(phase, device), is_whole=is_whole, limit=limit_of(phase, hardware))
    except Exception as error:  # noqa: BLE001 - a nicety must not cost anybody a run
        say(f"There is no prediction of memory for this run: {type(error).__name__}: {error}")
        return None


@dataclass(frozen=True)
class Forecast:
    """The part of a run that it is about, as it was predicted."""

    phase: Phase
    device: torch.device
    base: Bytes
    """What the process has taken already, where the device is the host."""
    is_whole: bool = False
    """Whether it tells of all phases of the run, and not only of the one that has its name."""
    limit: str | None = None
    """What its steps wait for most."""

    @classmethod
    def of(cls, phase: Phase, device: torch.device) -> Forecast:
        """Return a prediction made now."""
        return cls(phase, device, Bytes(0 if device.type == "cuda" else psutil.Process().memory_info().rss))

    @property
    def total(self) -> Bytes:
        """What the process will hold of the device."""
        return self.phase.reserved if self.device.type == "cuda" else Bytes(self.base + self.phase.peak)

    def line(self) -> str:
        """Say it in a line."""
        parts: dict[str, int] = {}
        for item in self.phase.items:
            if item.where == "device":
                parts[item.kind] = parts.get(item.kind, 0) + (item.size if item.at_peak is None else item.at_peak)
        most = sorted(parts.items(), key=lambda part: -part[1])[:4]
        about = ", ".join(f"{kind} {Bytes(size)}" for kind, size in most)
        who = f" of each of {ranks_here()} ranks" if ranks_here() > 1 else ""
        if self.device.type != "cuda":  # where others' libraries take memory that nobody can foresee
            return f"Predicted: about {self.total} on {self.device}{who} ({about})"
        limit = "" if self.limit is None else f", limited by {self.limit}"
        return f"Predicted: at most {self.total} on {self.device}{who} ({about}), {self.phase.seconds:.2g} s a step{limit}"

    def outcome(self, monitor: Monitor, seconds: float | None) -> str:
        """Say what was measured."""
        time = "" if seconds is None else f", {seconds:.2g} s a step"
        said = f" and {self.phase.seconds:.2g} s" if time and self.device.type == "cuda" else ""
        return f"Measured: {self.measured(monitor)} on {self.device}{time}; predicted were {self.total}{said}"

    def measured(self, monitor: Monitor) -> Bytes:
        """Return the most that the process held of the device in this phase."""
        seen = [
            memory.peak_reserved if self.device.type == "cuda" else memory.peak
            for (phase, device), memory in monitor.peaks.items()
            if (self.is_whole or phase == self.phase.name) and device == str(self.device)
        ]
        return max(seen, default=Bytes(0))

    def save(self, folder: Path, monitor: Monitor | None = None, seconds: float | None = None) -> None:
        """Write both into a run's folder."""
        content: dict[str, Any] = {
            "device": str(self.device),
            "predicted": {
                "bytes": int(self.total),
                "in_use": int(self.base + self.phase.peak),
                "seconds_per_step": self.phase.seconds if self.device.type == "cuda" else None,
                "limited_by": self.limit,
                "items": [
                    {"role": item.role, "kind": item.kind, "where": item.where, "bytes": int(item.size)}
                    for item in self.phase.items
                ],
            },
        }
        if monitor is not None:
            content["measured"] = {"bytes": int(self.measured(monitor)), "seconds_per_step": seconds}
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
