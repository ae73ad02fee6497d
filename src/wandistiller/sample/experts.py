"""The transformers of a pipeline by the noise they are for, at most one of them in memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import nn

from wandistiller.flow.path import NUM_TIMESTEPS
from wandistiller.memory.monitor import memory_line
from wandistiller.memory.streaming import stream_blocks
from wandistiller.models.load import load_model
from wandistiller.models.stored import StoredModel, build_empty
from wandistiller.terminal import progress
from wandistiller.units import Bytes


class Experts:
    """One transformer, or a first for much noise and a second for little, loaded when its turn comes."""

    def __init__(
        self,
        stored: Sequence[StoredModel],
        *,
        boundary: float | None,
        device: torch.device,
        dtype: torch.dtype,
        offload_to_cpu: bool = False,
    ) -> None:
        self._stored = list(stored)
        self._boundary = boundary
        self._device = device
        self._dtype = dtype
        self._offload = offload_to_cpu
        self._loaded: int | None = None
        self._model: nn.Module | None = None

    def index_at(self, timestep: float) -> int:
        """Return which expert a timestep belongs to: the second below the boundary."""
        if len(self._stored) == 1 or self._boundary is None:
            return 0
        return 0 if timestep >= self._boundary * NUM_TIMESTEPS else 1

    def at(self, timestep: float) -> nn.Module:
        """Return the transformer for a timestep, ready to compute; another one leaves memory first."""
        index = self.index_at(timestep)
        if self._model is None or self._loaded != index:
            self.release()
            self._model = self._load(index)
            self._loaded = index
        return self._model

    def release(self) -> None:
        """Free the transformer that is in memory."""
        self._model = self._loaded = None
        free_memory(self._device)

    @property
    def _should_stream(self) -> bool:
        """On the CPU the weights are in host memory as it is."""
        return self._offload and self._device.type != "cpu"

    def _load(self, index: int) -> nn.Module:
        stored = self._stored[index]
        name = "transformer" if len(self._stored) == 1 else ("high-noise expert", "low-noise expert")[index]
        total = sum(stored.weights.entries[key].num_bytes for key in stored.names.values())
        note = f"Loading {name} ({Bytes(total)})"
        with progress(note, len(stored.names), "part", lambda: memory_line(self._device)) as advance:
            if not self._should_stream:
                return load_model(stored, dtype=self._dtype, device=self._device, on_tensor=lambda *_: advance())

            def read(key: str) -> torch.Tensor:
                advance()
                return stored.read_for(key, self._dtype)

            # From the meta device straight into the streams' own memory: the model is never whole anywhere else.
            model = build_empty(stored.architecture, stored.config, dtype=self._dtype)
            stream_blocks(model, list(model.blocks), self._device, read=read)
            return model.requires_grad_(False)


def free_memory(device: torch.device) -> None:
    """Give what nothing refers to any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
