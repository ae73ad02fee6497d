"""Settings that go together for a machine, by name: taken before ``--config`` and flags, which may change any of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from wandistiller.errors import UsageError, nearest

_SMALL_CARD = {
    "teacher_dtype": "bfloat16",
    "batch_size": 1,
    "gradient_accumulation": 8,
    "activation_policy": "selective",
    "optimizer": "adamw8bit",
}

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "distill": {
            # One card of 24 GB: the teacher in host memory, streamed.
            "one-24gb": {**_SMALL_CARD, "teacher_device_strategy": "offload"},
            # One card of 48 GB or more: the teacher where it fits best.
            "one-48gb": {
                "teacher_device_strategy": "auto",
                "teacher_dtype": "bfloat16",
                "batch_size": 4,
                "gradient_accumulation": 2,
                "activation_policy": "selective",
            },
            # Two cards of 24 GB in one process: the teacher's layers over both, the student on the first.
            "two-24gb": {**_SMALL_CARD, "teacher_device_strategy": "balanced"},
            # Four cards of 40 GB under torchrun: each streams from one copy of the teacher in host memory.
            "four-40gb": {
                "distributed": True,
                "teacher_device_strategy": "offload",
                "teacher_dtype": "bfloat16",
                "batch_size": 2,
                "gradient_accumulation": 2,
                "activation_policy": "selective",
            },
            # No GPU: the teacher computes on the CPU.
            "no-gpu": {
                "device": "cpu",
                "teacher_device_strategy": "cpu",
                "batch_size": 1,
                "gradient_accumulation": 8,
                "activation_policy": "full",
            },
        }
    }
)


def find_preset(command: str, name: str) -> Mapping[str, Any]:
    """Return the settings of a command's preset; raise ``UsageError`` with the nearest name for another."""
    known = PRESETS.get(command, {})
    if name not in known:
        fix = f"Choose one of {', '.join(known)}." if known else "Leave it away."
        raise UsageError(f"There is no preset '{name}' of {command}{nearest(name, known)}", fix=fix)
    return known[name]
