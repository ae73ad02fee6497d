"""The weights that a VAE from scratch begins with."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from torch import nn

_LOG_VARIANCE = -6.0


@torch.no_grad()
def initialise_vae(vae: AutoencoderKLWan) -> None:
    """Draw convolutions so that pictures come through at full strength, and let latents begin with little noise.

    With PyTorch's own initialisation each layer keeps a third of what it is given, and with a variance of 1 the decoder sees
    next to nothing of what is left: such a VAE paints the average picture for thousands of steps.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    latents = vae.config["z_dim"]
    vae.quant_conv.weight[latents:] *= 0.1
    vae.quant_conv.bias[latents:] = _LOG_VARIANCE
