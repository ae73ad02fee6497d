"""Latents as a transformer sees them: with the VAE's own mean taken off and its std divided out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wandistiller.errors import UsageError


def latent_shape(vae_config: Mapping[str, Any], pixels: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the latents' shape (channels, frames, height, width) for pixels of shape (..., frames, height, width)."""
    frames, height, width = pixels[-3:]
    spatial, temporal = vae_config["scale_factor_spatial"], vae_config["scale_factor_temporal"]
    return vae_config["z_dim"], (frames - 1) // temporal + 1, height // spatial, width // spatial


def check_channels(vae_config: Mapping[str, Any], drawn: int) -> None:
    """Raise ``UsageError`` for a VAE whose latents have other channels than a transformer draws."""
    if vae_config["z_dim"] != drawn:
        raise UsageError(
            f"The VAE has {vae_config['z_dim']} latent channels, the transformer draws {drawn}.",
            fix="Use the VAE that belongs to the model: 16 channels for Wan 2.1 and A14B, 48 for the 5B.",
        )


def check_positions(transformer_config: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Raise ``UsageError`` for latents (..., frames, height, width) with more patches in a direction than are told apart."""
    longest = transformer_config["rope_max_seq_len"]
    frames, height, width = (size // patch for size, patch in zip(shape[-3:], transformer_config["patch_size"], strict=True))
    if max(frames, height, width) > longest:
        raise UsageError(
            "That is more than this model has positions for.",
            why=f"it would be {frames} by {height} by {width} patches of latents, and there are {longest} in each direction.",
            fix="Take fewer frames, or a smaller --width and --height.",
        )


def num_tokens(transformer_config: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Return how many tokens a transformer sees of latents (..., frames, height, width)."""
    return math.prod(size // patch for size, patch in zip(shape[-3:], transformer_config["patch_size"], strict=True))


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
