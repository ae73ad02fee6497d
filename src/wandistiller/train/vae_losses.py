"""What a VAE is trained to make small, each loss a pure function of tensors.

Pixels are (batch, 3, frames, height, width) from -1 to 1; the latent distribution is a mean and the logarithm of a variance of
one shape, channels second. Losses are computed in float32 or better whatever their inputs are in. Which of them count, from
which step on and for how much, is the method's to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def reconstruction(found: Tensor, wanted: Tensor, *, high_frequency_weight: float = 0.0) -> Tensor:
    """Return the mean absolute error, plus ``high_frequency_weight`` times that of the high band.

    A frame's low band is the frame blurred over 5x5 pixels, its high band what the blur takes away: texture and edges, which an
    absolute error alone lets a decoder smooth over. Weight 0 is the plain error.
    """
    if found.shape != wanted.shape:
        raise ValueError(f"pictures to compare have different shapes, {tuple(found.shape)} and {tuple(wanted.shape)}")
    error = _precise(found) - _precise(wanted)
    loss = error.abs().mean()
    if high_frequency_weight:
        # Bands are linear in the picture, so the difference of two high bands is the high band of the difference.
        loss = loss + high_frequency_weight * (error - _low_band(error)).abs().mean()
    return loss


def _low_band(pixels: Tensor) -> Tensor:
    """Average 3x3 neighbours twice, which weighs 1 2 3 2 1 each way; at a border, over those neighbours that there are."""
    frames = pixels.transpose(1, 2).flatten(0, 1)
    for _ in range(2):
        frames = functional.avg_pool2d(frames, 3, stride=1, padding=1, count_include_pad=False)
    return frames.unflatten(0, (pixels.shape[0], pixels.shape[2])).transpose(1, 2)


def kl_divergence(mean: Tensor, logvar: Tensor, *, free_bits: float = 0.0) -> Tensor:
    """Return the divergence from N(0, 1) in nats, averaged over the elements of the latents, not summed.

    So it is of one size for every length and resolution. With ``free_bits``, a channel whose own average over batch, frames and
    pixels is below that many nats counts as if it had them, and has no gradient: it may carry that much for nothing.
    """
    # As diffusers' DiagonalGaussianDistribution does before it draws a sample.
    mean, logvar = _precise(mean), _precise(logvar).clamp(-30.0, 20.0)
    divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar)
    if not free_bits:
        return divergence.mean()
    channels = divergence.transpose(0, 1).flatten(1).mean(1)
    return channels.clamp(min=free_bits).mean()


def kl_weight(step: int, *, beta: float, warmup_steps: int) -> float:
    """Return what the divergence counts in a global step: half a cosine from 0 at step 0 to ``beta`` at ``warmup_steps``."""
    if step >= warmup_steps:
        return beta
    return beta * 0.5 * (1 - math.cos(math.pi * step / warmup_steps))


def hinge_critic(real: Tensor, fake: Tensor) -> Tensor:
    """Return the critic's loss: 0 once every real logit is above 1 and every fake one below -1.

    The sum of both sides (Lim and Ye 2017), not their average.
    """
    return functional.relu(1 - _precise(real)).mean() + functional.relu(1 + _precise(fake)).mean()


def hinge_generator(fake: Tensor) -> Tensor:
    """Return the generator's loss, the lower the more real the critic finds what it made."""
    return -_precise(fake).mean()


def r1_penalty(critic: Callable[[Tensor], Tensor], real: Tensor, *, gamma: float, interval: int) -> Tensor:
    """Return ``interval * gamma / 2 * E|gradient of the critic at a real sample|^2`` (Mescheder et al. 2018).

    Taken in one of ``interval`` steps and times as much, it weighs as in every step (Karras et al. 2020). A sample's score is
    the mean of its logits, as it is to the hinge loss, the gradient is by the sample's pixels, and the expectation is over the
    batch. The penalty's graph, needed for the critic's own gradients, is freed by its backward pass; ``real`` and every
    ``.grad`` are left alone.
    """
    real = real.detach().requires_grad_(True)
    logits = critic(real)
    # Not backward(create_graph=True): real.grad would hold the graph that holds real, and neither would be freed.
    (gradient,) = torch.autograd.grad(_precise(logits).sum(), real, create_graph=True)
    # From sum to mean only now: a mean's gradient, spread over all pixels of a clip, is too small for float16.
    gradient = _precise(gradient) * (len(real) / logits.numel())
    return interval * gamma / 2 * gradient.square().flatten(1).sum(1).mean()


def adaptive_scale(for_reconstruction: Tensor, for_generator: Tensor, *, most: float = 1e4) -> Tensor:
    """Return the weight at which the generator's loss pulls the decoder as hard as reconstruction does (Esser et al. 2021).

    The ratio of the norms of both gradients at the decoder's last layer, from 0 to ``most``, in float32.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in (for_reconstruction, for_generator)]
    return (norms[0] / (norms[1] + 1e-4)).clamp(0.0, most)


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
