"""Flow matching: the student learns the velocity from data to noise, on latents of the user's clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wandistiller.data.loader import Batch
from wandistiller.distributed.ranks import Ranks
from wandistiller.flow.path import NUM_TIMESTEPS, data_from_velocity, interpolate, velocity_target
from wandistiller.train.method import Losses, Role, Turn

DecodeLatents = Callable[[Tensor], Tensor]
"""Turns normalised latents into pixels from -1 to 1, with a graph."""


@dataclass(frozen=True)
class PixelLoss:
    """A second look at the prediction, in pixels through the VAE's decoder."""

    decode: DecodeLatents
    weight: float


class FlowMatching:
    """One role, ``student``; batches have ``latents``, ``noise``, ``sigma`` and ``text``."""

    def __init__(self, student: Role, *, dtype: torch.dtype, pixels: PixelLoss | None = None) -> None:
        """``dtype`` is what the student's inputs are given in; ``pixels`` adds a loss in pixel space."""
        self.student = student
        self.roles: Mapping[str, Role] = {student.name: student}
        self.turns: Sequence[Turn] = (Turn(student.name, self.losses),)
        self._dtype = dtype
        self._pixels = pixels

    def losses(self, batch: Batch) -> Losses:
        """Return the mean squared error of the velocity, each sample alike."""
        tensors = batch.tensors
        errors, velocity, noisy = self._errors(tensors)
        losses = Losses(errors.mean())
        if self._pixels is not None:
            predicted = data_from_velocity(noisy, velocity, tensors["sigma"])
            with torch.no_grad():
                wanted = self._pixels.decode(tensors["latents"])
            # Near pure noise the prediction is an average that no picture looks like, so it counts the less.
            weight = (1 - tensors["sigma"]).view(-1, 1, 1, 1, 1)
            pixel = ((self._pixels.decode(predicted) - wanted).abs() * weight).mean()
            losses.metrics |= {"velocity_loss": losses.total, "pixel_loss": pixel}
            losses.total = losses.total + self._pixels.weight * pixel
        return losses

    def finish_step(self, ranks: Ranks) -> None:
        """Nothing is left to do."""

    @torch.no_grad()
    def held_out_errors(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the velocity's mean squared error of each sample."""
        return self._errors(tensors)[0]

    def _errors(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        latents, noise, sigma = tensors["latents"], tensors["noise"], tensors["sigma"]
        noisy = interpolate(latents, noise, sigma)
        velocity: Tensor = self.student(
            hidden_states=noisy.to(self._dtype),
            timestep=NUM_TIMESTEPS * sigma,
            encoder_hidden_states=tensors["text"].to(self._dtype),
            return_dict=False,
        )[0].float()
        return (velocity - velocity_target(latents, noise)).square().flatten(1).mean(1), velocity, noisy
