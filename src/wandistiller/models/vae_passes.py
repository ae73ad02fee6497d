"""A Wan VAE's two passes as training needs them: the whole distribution, and pixels that are not clamped.

diffusers clamps what it decodes to -1 to 1. Beyond that range the gradient would be zero, and a pixel that got there while
training would never come back.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor, nn


class VaePass(nn.Module):
    """Encode, draw, decode: one call, so that ranks can train it together."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        super().__init__()
        self.vae = vae
        self.register_buffer("adversarial_scale", torch.zeros((), device=next(vae.parameters()).device))
        self.adversarial_scale: Tensor
        """How loud a critic is, from the gradients of the step before: part of the state, so that a resumed run goes on."""

    def forward(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pixels from the latents ``mean + std * noise``, and their mean and the logarithm of their variance."""
        mean, logvar = encode_distribution(self.vae, pixels)
        latents = mean + torch.exp(0.5 * logvar) * noise.to(mean.dtype)
        return decode_unclamped(self.vae, latents), mean, logvar

    @property
    def last_layer(self) -> nn.Parameter:
        """The weights that pixels come from."""
        return self.vae.decoder.conv_out.weight


def lay_channels_last(model: nn.Module) -> None:
    """Lay the weights of all convolutions out channels last; pictures and clips follow them."""
    # Not through Module.to(), which takes one layout for convolutions over two and over three dimensions.
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in model.parameters():
        if parameter.ndim in layouts:
            parameter.data = parameter.data.contiguous(memory_format=layouts[parameter.ndim])


def encode_distribution(vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance of the latents of pixels (batch, 3, frames, height, width)."""
    distribution = vae.encode(pixels).latent_dist
    return distribution.mean, distribution.logvar


def decode_unclamped(vae: Any, latents: Tensor) -> Tensor:
    """Decode latents frame by frame, each handing its last features on to the next, without the clamp at the end."""
    vae.clear_cache()
    hidden = vae.post_quant_conv(latents)
    chunks = []
    for index in range(latents.shape[2]):
        vae._conv_idx = [0]
        options = {"first_chunk": True} if index == 0 else {}
        frame = hidden[:, :, index : index + 1]
        chunks.append(vae.decoder(frame, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, **options))
    vae.clear_cache()
    pixels = torch.cat(chunks, 2)
    return pixels if vae.config.patch_size is None else unpatchify(pixels, patch_size=vae.config.patch_size)
