"""The straight path between data and noise, and the three ways to look at a point on it."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_TIMESTEPS = 1000
"""A Wan model is told ``NUM_TIMESTEPS * sigma``."""


def interpolate(data: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """Return the noisy point at ``sigma``; a tensor of sigmas holds one for each sample of the batch."""
    sigma = _per_sample(sigma, data)
    return (1 - sigma) * data + sigma * noise


def velocity_target(data: Tensor, noise: Tensor) -> Tensor:
    """Return what the model should predict, the same at every sigma of one path."""
    return noise - data


def data_from_velocity(noisy: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """Return the data that a velocity at ``noisy`` points to."""
    return noisy - _per_sample(sigma, noisy) * velocity


def noise_from_velocity(noisy: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """Return the noise that a velocity at ``noisy`` comes from."""
    return noisy + (1 - _per_sample(sigma, noisy)) * velocity


def _per_sample(sigma: Tensor | float, like: Tensor) -> Tensor | float:
    if not isinstance(sigma, torch.Tensor) or sigma.ndim == 0:
        return sigma
    return sigma.reshape(-1, *[1] * (like.ndim - 1))
