"""What an optimiser holds beside the weights, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

_SCALAR = 4
_GROUP = 256
"""Values that share a scale in 8-bit state (bitsandbytes)."""
_LEAST_SHORT = 4096
"""Smaller tensors keep their state in 32 bits (bitsandbytes)."""


@dataclass(frozen=True)
class OptimiserChoice:
    """An optimiser by name, and how weights in 16 bits take its updates."""

    name: str = "adamw"
    rounding: Literal["masters", "stochastic"] = "masters"

    def has_master(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype.itemsize < 4 and self.rounding == "masters"

    def masters(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return the bytes of float32 copies, made before the first step."""
        return [4 * parameter.numel() for parameter in parameters if self.has_master(parameter)]

    def state(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return the bytes of moments, made in the first step."""
        return [size for parameter in parameters for size in self._state(parameter)]

    def scratch(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return the bytes that a step needs for a moment."""
        counts = [parameter.numel() for parameter in parameters]
        if not counts:
            return []
        if self.name == "adafactor":  # one weight's update at a time
            return [4 * max(counts)]
        is_stochastic = self.rounding == "stochastic" and any(parameter.dtype.itemsize < 4 for parameter in parameters)
        return [4 * max(counts)] * 6 if is_stochastic else []

    def _state(self, parameter: torch.Tensor) -> list[int]:
        count = parameter.numel()
        if self.name == "adafactor":
            if parameter.ndim < 2:
                return [4 * count, _SCALAR]
            rows, columns = count // parameter.shape[-1], count // parameter.shape[-2]
            return [4 * rows, 4 * columns, _SCALAR]
        if self.name == "adamw8bit":
            if count < _LEAST_SHORT:
                return [4 * count, 4 * count]
            return [count, count, 4 * -(-count // _GROUP), 4 * -(-count // _GROUP)]
        return [4 * count, 4 * count, _SCALAR]
