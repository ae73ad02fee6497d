"""The transformers of a pipeline by the noise they are for, at most one of them in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from wandistiller.flow.path import NUM_TIMESTEPS
from wandistiller.memory.monitor import memory_line
from wandistiller.memory.placement import Placed, Placement
from wandistiller.memory.subjects import stored_subject
from wandistiller.models.devices import free_memory
from wandistiller.models.stored import StoredModel
from wandistiller.terminal import progress, say
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
        placement: Placement,
        prepare: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        """``prepare`` is called with each transformer while it is still empty."""
        self._stored = list(stored)
        self._boundary = boundary
        self._device = device
        self._dtype = dtype
        self._placement = placement
        self._prepare = prepare
        self._loaded: int | None = None
        self._model: nn.Module | None = None
        self._placed: Placed | None = None

    def index_at(self, timestep: float) -> int:
        """Return which expert a timestep belongs to: the second below the boundary."""
        if len(self._stored) == 1 or self._boundary is None:
            return 0
        return 0 if timestep >= self._boundary * NUM_TIMESTEPS else 1

    def at(self, timestep: float) -> nn.Module:
        """Return the transformer for a timestep, ready to compute; another one leaves memory first."""
        return self.expert(self.index_at(timestep))

    def expert(self, index: int) -> nn.Module:
        """Return one by its number, ready to compute; another one leaves memory first."""
        if self._model is None or self._loaded != index:
            self.release()
            self._model = self._load(index)
            self._loaded = index
        return self._model

    def release(self) -> None:
        """Free the transformer that is in memory."""
        self._model = self._loaded = self._placed = None
        free_memory(self._device)

    def keep_up(self) -> None:
        """Call after a step: brings onto the device what the bus is too slow for, if there is room."""
        if self._placed is not None:
            note = self._placed.keep_up()
            if note:
                say(note)

    def _load(self, index: int) -> nn.Module:
        stored = self._stored[index]
        name = "transformer" if len(self._stored) == 1 else ("high-noise expert", "low-noise expert")[index]
        note, reads = f"Loading {name} ({Bytes(stored.num_bytes)})", itertools.count()
        with progress(note, len(stored.names), "part", lambda: memory_line(self._device)) as advance:

            def on_read() -> None:
                next(reads)
                advance()

            # From the meta device straight to where the weights will be: the model is never whole anywhere else.
            subject = stored_subject(stored, self._dtype, on_read=on_read)
            self._prepare(subject.model)
            self._placed = self._placement.attach(subject, self._device)
            advance(len(stored.names) - next(reads))  # the rest is read from its file when it is used
        if self._placed.note:
            say(f"Placement {self._placed.note}")
        return subject.model
