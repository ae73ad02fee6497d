"""The critic of adversarial training: looks at patches of frames and at how they move, and gives each a logit.

A PatchGAN (Isola et al. 2017) whose convolutions also reach over the frames before and after, each with its spectral norm
held at 1 (Miyato et al. 2018). It knows nothing of the losses that it is trained with.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

_MOST_WIDENING = 8
_NUM_LAYERS = 3
_SLOPE = 0.2


class PatchCritic(nn.Module):
    """Logits, higher for what looks real, of overlapping patches of pixels.

    Takes pixels (batch, channels, frames, height, width) and gives (batch, 1, frames, rows, columns); a single frame is a clip
    of one. Time is never strided: a frame's logits are of itself and its neighbours, and beyond the ends the first and the last
    frame stand still, so that a frame alone scores as it would in a clip where nothing moves.

    There is no batch norm: it would let the samples of a batch score each other, where the gradient penalty is of each sample
    alone, and clips are large enough that a batch is often one.

    The spectral norms are estimates, in the buffers ``_u`` and ``_v``, which follow the weights when ``update_norms`` is called
    and not, as usual, in every call: else calls would change each other's logits, and a step whose batch is split over calls
    or ranks would be another step.
    """

    def __init__(self, *, base_width: int = 64, num_layers: int = _NUM_LAYERS, in_channels: int = 3) -> None:
        """``num_layers`` halve the picture and double the width, from ``base_width`` to at most eight times that."""
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"a critic needs a layer that halves the picture, but num_layers is {num_layers}")
        self.in_channels = in_channels
        self.smallest_side = smallest_side(num_layers)
        widths = [in_channels] + [base_width * min(2**number, _MOST_WIDENING) for number in range(num_layers + 1)]
        layers = [
            CriticLayer(width, wider, stride=2 if number < num_layers else 1)
            for number, (width, wider) in enumerate(pairwise(widths))
        ]
        layers.append(CriticLayer(widths[-1], 1, stride=1, is_last=True))
        self.layers = nn.ModuleList(layers)
        self.train()

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits; raises ``ValueError`` for pixels that are no clip or too small to hold a patch."""
        self._check(pixels)
        hidden = pixels
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def train(self, mode: bool = True) -> PatchCritic:
        super().train(mode)
        for layer in self.layers:
            layer.conv.parametrizations.eval()
        return self

    @torch.no_grad()
    def update_norms(self) -> None:
        """Bring the estimates of the spectral norms closer to the weights as they are now; call it once after every change."""
        for layer in self.layers:
            layer.conv.parametrizations.train()
            layer.conv.parametrizations["weight"]()
            layer.conv.parametrizations.eval()

    def _check(self, pixels: Tensor) -> None:
        if pixels.ndim != 5 or pixels.shape[1] != self.in_channels or pixels.shape[2] < 1:
            raise ValueError(
                f"the critic wants (batch, {self.in_channels}, frames, height, width), but was given {tuple(pixels.shape)}"
            )
        height, width = pixels.shape[-2:]
        if min(height, width) < self.smallest_side:
            raise ValueError(
                f"the critic's patches need at least {self.smallest_side}x{self.smallest_side} pixels, but the picture has "
                f"{height}x{width}; use larger pictures or crops, or a critic of fewer layers"
            )


def smallest_side(num_layers: int = _NUM_LAYERS) -> int:
    """Return the fewest rows and columns that leave a patch: each halving rounds down, each layer after them takes one away."""
    return 3 * 2**num_layers


class CriticLayer(nn.Module):
    """A convolution over three frames and 4x4 pixels, then a leaky rectifier unless it is the last."""

    def __init__(self, width: int, wider: int, *, stride: int, is_last: bool = False) -> None:
        super().__init__()
        self.conv = spectral_norm(nn.Conv3d(width, wider, (3, 4, 4), stride=(1, stride, stride), padding=(0, 1, 1)))
        self.is_last = is_last

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next layer's input."""
        # The norm is estimated from a product of matrices that 16 bits are too few for.
        with torch.autocast(hidden.device.type, enabled=False):
            weight = self.conv.weight
        # Not through replicate padding, whose backward pass has no fixed order on CUDA.
        hidden = torch.cat([hidden[:, :, :1], hidden, hidden[:, :, -1:]], dim=2)
        hidden = functional.conv3d(hidden, weight, self.conv.bias, self.conv.stride, self.conv.padding)
        return hidden if self.is_last else functional.leaky_relu(hidden, _SLOPE)
