"""Device and precision by name, with what is best here behind ``auto``."""

from __future__ import annotations

import gc

import torch
from torch import nn

from wandistiller.errors import UsageError

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CAST_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Those whose weights autocast casts."""


def available_devices() -> list[torch.device]:
    """List the devices of this machine, fastest first; the CPU is always the last."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    return [*devices, torch.device("cpu")]


def find_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` is the fastest there is."""
    devices = available_devices()
    if name == "auto":
        return devices[0]
    device = device_named(name)
    if device not in devices:
        raise UsageError(
            f"--device {name} is not there.",
            why=f"this machine has {', '.join(map(str, devices))}.",
            fix="Choose one of these, or 'auto'; wandistiller doctor tells more.",
        )
    return device


def device_named(name: str) -> torch.device:
    """Return the device that a name stands for, on this machine or on another."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "mps", "cpu"):
        raise UsageError(f"--device {name} is not a device.", fix="Use cuda, cuda:1, mps, cpu or auto.")
    if device.type == "cuda":
        return torch.device("cuda", device.index or 0)
    return torch.device(device.type)  # there is one of them, whatever its number


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return a precision by name; ``auto`` is bfloat16 on a GPU and float32 on the CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def free_memory(device: torch.device) -> None:
    """Give what nothing refers to any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
