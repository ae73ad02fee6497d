"""AdamW's step on tensors in host memory, with the kernel of ``torch.optim.AdamW(fused=True)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UPDATE_TRAFFIC = 30
"""Bytes a weight that are read and written: master and moments in float32, a gradient, weights to compute with, in 16 bits."""


@dataclass(frozen=True)
class AdamW:
    """What a step does with a gradient."""

    rate: float
    betas: tuple[float, float]
    weight_decay: float
    number: Tensor
    """Of the step, counted from 1."""
    divisor: Tensor | None = None
    """What gradients are divided by first."""

    def step(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]
    ) -> None:
        """Change float32 weights and their moments; gradients are used up."""
        torch._fused_adamw_(
            list(weights),
            list(gradients),
            list(first),
            list(second),
            [],
            [self.number] * len(weights),
            lr=self.rate,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=self.divisor,
        )
