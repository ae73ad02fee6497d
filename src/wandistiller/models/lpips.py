"""LPIPS: how different two pictures look, as a distance between their features in VGG16.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", version 0.1 of their weights. Each
of five features is brought to unit length over its channels; the squared differences are weighted by a published linear
head, averaged over the picture and summed. Everything here is frozen: the gradient goes to the pixels alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from wandistiller.errors import CheckpointError, UsageError, shortened
from wandistiller.models.lpips_weights import HOW_TO_GET_THEM, VGG16_DEPTHS, VGG16_WIDTHS, lpips_file
from wandistiller.models.weight_files import Weights, open_weights

# The mean and std of ImageNet as the authors of LPIPS rounded them, for pixels from -1 to 1.
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
_EPSILON = 1e-10

_PIXELS_TOGETHER = 256 * 256
"""Pictures of fewer pixels are compared together: to launch a call takes a fast GPU longer than to compute as many."""

SMALLEST_SIDE = 2 ** (len(VGG16_DEPTHS) - 1)
"""Fewest rows and columns that VGG16 can halve between its stages."""


class Lpips(nn.Module):
    """The distance of pictures or clips from their references."""

    def __init__(self, *, widths: Sequence[int] = VGG16_WIDTHS, checkpointing: bool = False) -> None:
        """Make the network with random convolutions and all heads one; ``load_lpips`` gives the published weights.

        ``checkpointing`` takes the pictures of a batch or clip one by one, small ones a few together, keeps nothing of them but
        their pixels, and computes each again in the backward pass. The peak is then that of one picture, however many there
        are; one alone gains nothing.
        """
        super().__init__()
        self.checkpointing = checkpointing
        self.stages = nn.ModuleList(
            _Stage(width_in, width, depth, pools=index > 0)
            for index, (width_in, width, depth) in enumerate(zip((3, *widths), widths, VGG16_DEPTHS, strict=False))
        )
        self.heads = nn.ParameterList(torch.ones(width) for width in widths)
        self.register_buffer("shift", torch.tensor(_SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(_SCALE).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)
        self.eval()

    def forward(self, pixels: Tensor, reference: Tensor) -> Tensor:
        """Return one distance a sample, at least in float32; a clip's is the mean over its frames.

        Both are (batch, 3, height, width) or (batch, 3, frames, height, width), from -1 to 1. ``reference`` gets no gradient.
        """
        _check(pixels, reference)
        reference = reference.detach()
        samples = len(pixels)
        if pixels.ndim == 5:
            pixels, reference = (clip.transpose(1, 2).flatten(0, 1) for clip in (pixels, reference))
        if self.checkpointing:
            # By picture and not by stage of the network: the first stage alone, at full size, sets a picture's peak.
            together = max(_PIXELS_TOGETHER // pixels[0, 0].numel(), 1)
            distances = torch.cat(
                [
                    checkpoint(self._compare, *pair, use_reentrant=False, preserve_rng_state=False)
                    for pair in zip(pixels.split(together), reference.split(together), strict=True)
                ]
            )
        else:
            distances = self._compare(pixels, reference)
        return distances.view(samples, -1).mean(1)

    def _compare(self, pixels: Tensor, reference: Tensor) -> Tensor:
        """Return the distance of each picture from its reference."""
        features, wanted = self._scaled(pixels), self._scaled(reference)
        distances = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            features = stage(features)
            with torch.no_grad():
                wanted = stage(wanted)
            by_channel = (_to_unit_length(features) - _to_unit_length(wanted)).square().mean((2, 3))
            # Not a matrix product, which autocast would take out of float32.
            distances.append((by_channel * head.to(by_channel.dtype)).sum(1))
        return torch.stack(distances).sum(0)

    def _scaled(self, pixels: Tensor) -> Tensor:
        return ((pixels - self.shift) / self.scale).to(self.shift.dtype)


class _Stage(nn.Module):
    """The convolutions of VGG16 at one resolution."""

    def __init__(self, width_in: int, width: int, depth: int, *, pools: bool) -> None:
        super().__init__()
        self.pools = pools
        self.convs = nn.ModuleList(nn.Conv2d(width if index else width_in, width, 3, padding=1) for index in range(depth))

    def forward(self, features: Tensor) -> Tensor:
        if self.pools:
            features = functional.max_pool2d(features, 2)
        for conv in self.convs:
            features = functional.relu_(conv(features))
        return features


def _to_unit_length(features: Tensor) -> Tensor:
    if features.dtype in (torch.float16, torch.bfloat16):  # in float16 the epsilon would be zero
        features = features.float()
    # Not the root of a sum of squares: its gradient is NaN where all features are zero, and this one's is zero.
    return features / (torch.linalg.vector_norm(features, dim=1, keepdim=True) + _EPSILON)


def _check(pixels: Tensor, reference: Tensor) -> None:
    if pixels.shape != reference.shape or pixels.ndim not in (4, 5) or pixels.shape[1] != 3:
        raise ValueError(f"pixels are {tuple(pixels.shape)} and their reference {tuple(reference.shape)}")
    height, width = pixels.shape[-2:]
    if min(height, width) < SMALLEST_SIDE:
        raise UsageError(
            f"LPIPS cannot compare pictures of {width}x{height} pixels.",
            why="VGG16 halves them four times.",
            fix=f"Use pictures of at least {SMALLEST_SIDE}x{SMALLEST_SIDE} pixels.",
        )


def open_lpips(path: Path | None = None) -> Weights:
    """Return the published weights in the user's cache or in ``path``, of which only the header is read and checked."""
    path = path or lpips_file()
    if not path.is_file():
        raise UsageError("The weights of LPIPS are not here.", why=f"{path} does not exist.", fix=HOW_TO_GET_THEM)
    weights = open_weights(path)
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in Lpips(widths=VGG16_WIDTHS).state_dict().items()}
    found = {name: entry.shape for name, entry in weights.entries.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise CheckpointError(
            f"{path} does not hold the weights of LPIPS.", why=f"wrong: {shortened(wrong)}.", fix=HOW_TO_GET_THEM
        )
    return weights


def load_lpips(path: Path | None = None, checkpointing: bool = False) -> Lpips:
    """Return LPIPS with the published weights from the user's cache or from ``path``, on the CPU in float32."""
    weights = open_lpips(path)
    with torch.random.fork_rng(devices=[]):  # a loss that is switched on should not change what is drawn in a training
        lpips = Lpips(widths=VGG16_WIDTHS, checkpointing=checkpointing)
    lpips.load_state_dict({name: weights.read(name) for name in weights.entries})
    return lpips
