"""How close pictures are to their originals, in numbers that papers give.

Both measures take pixels (batch, 3, frames, height, width) from -1 to 1 and give one number for each sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RANGE = 2.0
"""From the darkest pixel to the brightest."""
WINDOW = 11
"""Pixels that a side has at least, for structural similarity."""
_SIGMA = 1.5
_K1, _K2 = 0.01, 0.03


def psnr(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB, of the error over all of a sample; infinite where there is none."""
    _check(found, wanted)
    errors = (_precise(found) - _precise(wanted)).square().flatten(1).mean(1)
    return 10 * torch.log10(_RANGE**2 / errors)


def ssim(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the structural similarity (Wang et al. 2004), 1 for equal pictures, averaged over frames, channels and places.

    Windows are Gaussian, 11x11 with a deviation of 1.5, and lie wholly inside the picture (no padding), as in the authors' own
    program. Raises ``ValueError`` for pictures smaller than a window.
    """
    _check(found, wanted)
    if min(found.shape[-2:]) < WINDOW:
        raise ValueError(
            f"structural similarity needs at least {WINDOW}x{WINDOW} pixels, "
            f"but the picture has {found.shape[-2]}x{found.shape[-1]}"
        )
    # Frame by frame: the maps of a whole clip take many times its memory.
    frames = [_frame_ssim(found[:, :, number], wanted[:, :, number]) for number in range(found.shape[2])]
    return torch.stack(frames).mean(0)


def _frame_ssim(found: Tensor, wanted: Tensor) -> Tensor:
    # The first term compares brightness as a ratio, so it is counted from black, as published numbers do from 0 to 255.
    found, wanted = _precise(found) + 1, _precise(wanted) + 1
    steady1, steady2 = (_K1 * _RANGE) ** 2, (_K2 * _RANGE) ** 2
    mean1, mean2 = _smooth(found), _smooth(wanted)
    variance1 = _smooth(found.square()) - mean1.square()
    variance2 = _smooth(wanted.square()) - mean2.square()
    covariance = _smooth(found * wanted) - mean1 * mean2
    brightness = (2 * mean1 * mean2 + steady1) / (mean1.square() + mean2.square() + steady1)
    structure = (2 * covariance + steady2) / (variance1 + variance2 + steady2)
    return (brightness * structure).flatten(1).mean(1)


def _smooth(pictures: Tensor) -> Tensor:
    """Return the Gaussian mean of every window, rows and columns in turn."""
    # A sum of slices and not a convolution: that may run in TF32, too coarse for variances that are differences of squares.
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weights = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    weights = weights / weights.sum()
    for dim in (-2, -1):
        length = pictures.shape[dim] - WINDOW + 1
        taps = enumerate(weights.tolist())
        pictures = torch.stack([pictures.narrow(dim, start, length) * weight for start, weight in taps]).sum(0)
    return pictures


def _check(found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape or found.ndim != 5:
        raise ValueError(
            "pictures to compare are both (batch, 3, frames, height, width), "
            f"but these are {tuple(found.shape)} and {tuple(wanted.shape)}"
        )


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
