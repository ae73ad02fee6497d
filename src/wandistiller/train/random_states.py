"""The global random numbers of a process, as plain values that a training state can hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all global random numbers, as plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Go on from states that were returned before."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)


@contextmanager
def keep_random_states(device: torch.device) -> Iterator[None]:
    """Let what is drawn inside of the block make no difference to what is drawn after it."""
    before = random_states(device)
    try:
        yield
    finally:
        set_random_states(before, device)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()
