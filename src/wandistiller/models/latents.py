"""Latents as a transformer sees them: with the VAE's own mean taken off and its std divided out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def normalise(latents: Tensor, vae_config: Mapping[str, Any]) -> Tensor:
    """Turn what the VAE's encoder gives (batch, channels, frames, height, width) into what a transformer takes."""
    mean, std = _statistics(latents, vae_config)
    return (latents - mean) / std


def denormalise(latents: Tensor, vae_config: Mapping[str, Any]) -> Tensor:
    """Turn what a transformer gives into what the VAE's decoder takes."""
    mean, std = _statistics(latents, vae_config)
    return latents * std + mean


def _statistics(latents: Tensor, vae_config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    mean, std = (
        torch.tensor(vae_config[name], dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    return mean, std
