"""Classifier-free guidance as a velocity."""

from __future__ import annotations

from torch import Tensor


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Push the velocity away from the unconditional one; ``scale`` 1 leaves the conditional as it is."""
    return unconditional + scale * (conditional - unconditional)


def needs_unconditional(scale: float) -> bool:
    """Say whether guidance at this scale costs a second pass through the model."""
    return scale > 1.0
