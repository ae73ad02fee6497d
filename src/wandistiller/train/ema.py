"""A moving average of trained parameters in float32: what samples are drawn with and what is exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """``average = decay * average + (1 - decay) * parameter`` after every step.

    Early on the decay is smaller, ``(1 + step) / (10 + step)``, so that the random start is soon forgotten.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, device: torch.device | None = None) -> None:
        """Start from the parameters; ``device`` keeps the average elsewhere, such as in host memory."""
        self._parameters = dict(parameters)
        self.decay = decay
        self.averages = {name: value.detach().to(device, torch.float32, copy=True) for name, value in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after a step."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, average in self.averages.items():
            average.lerp_(self._parameters[name].detach().to(average.device, torch.float32), weight)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the model have the averages for as long as the block runs."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._write(self.averages)
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
