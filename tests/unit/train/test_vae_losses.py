"""Losses of VAE training against closed forms, and their gradients against finite differences."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import nn
from torch.autograd import gradcheck

from wandistiller.models.critic import PatchCritic
from wandistiller.train.vae_losses import (
    adaptive_scale,
    hinge_critic,
    hinge_generator,
    kl_divergence,
    kl_weight,
    r1_penalty,
    reconstruction,
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape, trained=False):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=trained)


# Reconstruction


def low_band_by_hand(picture):
    """Each pixel's mean over the 3x3 neighbours that there are, twice, pixel by pixel."""
    for _ in range(2):
        blurred = np.empty_like(picture)
        for row in range(picture.shape[0]):
            for column in range(picture.shape[1]):
                blurred[row, column] = picture[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2].mean()
        picture = blurred
    return picture


def test_reconstruction_is_the_mean_absolute_error():
    found, wanted = randn(2, 3, 2, 5, 4), randn(2, 3, 2, 5, 4)
    by_hand = sum(abs(a - b) for a, b in zip(found.flatten().tolist(), wanted.flatten().tolist(), strict=True)) / found.numel()
    assert reconstruction(found, wanted).item() == pytest.approx(by_hand, rel=1e-12)
    assert reconstruction(found, found).item() == 0


def test_the_high_band_is_what_the_blur_takes_away():
    found, wanted = randn(2, 3, 2, 7, 6), randn(2, 3, 2, 7, 6)
    error = (found - wanted).numpy().reshape(-1, 7, 6)
    # The bands of each picture on their own, where the loss takes those of the difference.
    high = [
        np.stack([picture - low_band_by_hand(picture) for picture in pictures.numpy().reshape(-1, 7, 6)])
        for pictures in (found, wanted)
    ]
    wanted_loss = np.abs(error).mean() + 0.7 * np.abs(high[0] - high[1]).mean()
    assert reconstruction(found, wanted, high_frequency_weight=0.7).item() == pytest.approx(wanted_loss, rel=1e-12)


def test_a_wrong_brightness_is_all_low_and_a_checkerboard_nearly_all_high():
    wanted = torch.zeros(1, 3, 1, 16, 16, dtype=torch.float64)
    assert reconstruction(wanted + 0.3, wanted, high_frequency_weight=1.0).item() == pytest.approx(0.3, rel=1e-12)
    board = (-1.0) ** (torch.arange(16)[:, None] + torch.arange(16)).expand(1, 3, 1, 16, 16).double()
    high = reconstruction(board, wanted, high_frequency_weight=1.0).item() - 1
    # Inside, 3x3 neighbours of a checkerboard average to a ninth, twice to an 81st: the rest is high.
    assert 0.9 < high < 1
    centre = (board - reconstruction_low(board))[0, 0, 0, 8, 8]
    assert centre.abs().item() == pytest.approx(1 - 1 / 81, rel=1e-12)


def reconstruction_low(pixels):
    return torch.from_numpy(np.stack([low_band_by_hand(frame) for frame in pixels.numpy().reshape(-1, 16, 16)])).view_as(pixels)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_gradient_of_reconstruction(weight):
    found, wanted = randn(1, 3, 2, 5, 5, trained=True), randn(1, 3, 2, 5, 5, trained=True)
    assert gradcheck(lambda a, b: reconstruction(a, b, high_frequency_weight=weight), (found, wanted))


def test_pictures_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        reconstruction(torch.zeros(1, 3, 1, 8, 8), torch.zeros(1, 3, 2, 8, 8))


# Divergence


def test_divergence_is_the_analytic_one_of_each_element():
    mean, logvar = randn(3, 4, 2, 5, 5), randn(3, 4, 2, 5, 5)
    analytic = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, (0.5 * logvar).exp()), torch.distributions.Normal(0.0, 1.0)
    )
    assert kl_divergence(mean, logvar).item() == pytest.approx(analytic.mean().item(), rel=1e-12)
    assert kl_divergence(torch.zeros(2, 4, 1, 2, 2), torch.zeros(2, 4, 1, 2, 2)).item() == 0


def test_variances_are_limited_as_diffusers_limits_them():
    mean, logvar = randn(2, 4, 3, 3), 40 * randn(2, 4, 3, 3)
    assert logvar.min() < -30 and logvar.max() > 20
    theirs = DiagonalGaussianDistribution(torch.cat([mean, logvar], dim=1)).kl() / mean[0].numel()
    assert kl_divergence(mean, logvar).item() == pytest.approx(theirs.mean().item(), rel=1e-12)


def test_channels_below_their_free_bits_cost_those_and_have_no_gradient():
    mean = torch.zeros(2, 3, 1, 2, 2, dtype=torch.float64)
    mean[:, 1], mean[:, 2] = 1.0, 2.0
    mean.requires_grad_(True)
    # With a variance of 1 a channel's divergence is mean^2 / 2: 0, 0.5 and 2 nats.
    loss = kl_divergence(mean, torch.zeros_like(mean), free_bits=0.75)
    assert loss.item() == pytest.approx((0.75 + 0.75 + 2.0) / 3, rel=1e-12)
    loss.backward()
    assert mean.grad[:, :2].abs().max() == 0
    # d/dm of m^2 / 2, over all of 24 elements.
    torch.testing.assert_close(mean.grad[:, 2], torch.full((2, 1, 2, 2), 2.0 / 24, dtype=torch.float64))


def test_free_bits_are_of_the_channels_average_not_of_each_element():
    mean = torch.zeros(1, 1, 1, 1, 2, dtype=torch.float64)
    mean[..., 1] = 2.0
    # 0 and 2 nats average to 1, above 0.5: nothing is free, though one element is below.
    assert kl_divergence(mean, torch.zeros_like(mean), free_bits=0.5).item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("free_bits", [0.0, 0.8])
def test_gradient_of_the_divergence(free_bits):
    spread = torch.tensor([0.1, 2.0], dtype=torch.float64).view(1, 2, 1, 1, 1)
    mean, logvar = ((randn(2, 2, 1, 2, 2) * spread).requires_grad_(True) for _ in range(2))
    assert gradcheck(lambda a, b: kl_divergence(a, b, free_bits=free_bits), (mean, logvar))


def test_the_divergence_is_exact_from_16_bits():
    mean, logvar = torch.randn(2, 4, 2, 8, 8).bfloat16(), torch.randn(2, 4, 2, 8, 8).bfloat16()
    loss = kl_divergence(mean, logvar)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(kl_divergence(mean.double(), logvar.double()).item(), rel=1e-5)


def test_weight_of_the_divergence_rises_as_half_a_cosine():
    weights = [kl_weight(step, beta=0.2, warmup_steps=100) for step in range(150)]
    assert weights[0] == 0
    assert weights[50] == pytest.approx(0.1)
    # sin^2(pi/8) is (2 - sqrt 2) / 4.
    assert weights[25] == pytest.approx(0.2 * (2 - math.sqrt(2)) / 4)
    assert weights == sorted(weights)
    assert set(weights[100:]) == {0.2}
    assert kl_weight(0, beta=0.2, warmup_steps=0) == 0.2


# Hinge


def test_hinge_of_the_critic_by_hand():
    real, fake = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([-2.0, -0.5, 1.0])
    # Real: 0, 0.5, 2. Fake: 0, 0.5, 2.
    assert hinge_critic(real, fake).item() == pytest.approx(5 / 3)
    assert hinge_critic(torch.tensor([1.5]), torch.tensor([-1.5])).item() == 0


def test_hinge_signs():
    real, fake = torch.zeros(4, requires_grad=True), torch.zeros(6, requires_grad=True)
    assert hinge_critic(real, fake).item() == 2
    hinge_critic(real, fake).backward()
    torch.testing.assert_close(real.grad, torch.full((4,), -1 / 4))  # descending raises real logits
    torch.testing.assert_close(fake.grad, torch.full((6,), 1 / 6))  # and lowers fake ones
    fake.grad = None
    hinge_generator(fake).backward()
    torch.testing.assert_close(fake.grad, torch.full((6,), -1 / 6))  # the generator wants them high
    assert hinge_generator(torch.tensor([3.0, 1.0])).item() == -2


def test_gradient_of_the_hinges():
    real, fake = randn(2, 1, 3, 2, 2, trained=True), randn(2, 1, 3, 2, 2, trained=True)
    assert gradcheck(hinge_critic, (real, fake))
    assert gradcheck(hinge_generator, (fake,))


# R1


def test_penalty_of_a_linear_critic_is_its_closed_form():
    weight, real = randn(3, 2, 4, 4), randn(5, 3, 2, 4, 4)
    for gamma, interval in ((5.0, 16), (10.0, 1)):
        penalty = r1_penalty(lambda x: (x * weight).flatten(1).sum(1), real, gamma=gamma, interval=interval)
        assert penalty.item() == pytest.approx(gamma / 2 * weight.square().sum().item() * interval, rel=1e-12)


def test_gradient_of_a_linear_critics_penalty_is_its_closed_form():
    weight = randn(3, 1, 2, 2, trained=True)
    r1_penalty(lambda x: (x * weight).flatten(1).sum(1), randn(4, 3, 1, 2, 2), gamma=5.0, interval=16).backward()
    torch.testing.assert_close(weight.grad, 16 * 5.0 * weight.detach())


def test_penalty_is_of_each_sample_and_of_the_mean_of_its_logits():
    """D(x) = x^2 / 2 for each pixel: the gradient of the mean of n logits is x / n."""
    real = randn(3, 3, 2, 4, 4)
    penalty = r1_penalty(lambda x: x.square() / 2, real, gamma=1.0, interval=1)
    by_hand = [0.5 * (sample / sample.numel()).square().sum().item() for sample in real]
    assert penalty.item() == pytest.approx(sum(by_hand) / 3, rel=1e-12)


def test_gradient_of_the_penalty_by_the_critics_weights():
    first, second, real = randn(6, 5, trained=True), randn(5, trained=True), randn(4, 6)
    assert gradcheck(
        lambda a, b: r1_penalty(lambda x: torch.tanh(x @ a) @ b, real, gamma=5.0, interval=16),
        (first, second),
    )


def test_gradient_of_the_penalty_through_the_patch_critic():
    critic = PatchCritic(base_width=2, num_layers=1).double().eval()
    real = randn(2, 3, 2, 8, 8)
    weights = [parameter for parameter in critic.parameters() if parameter.ndim > 1]
    directions = [torch.randn_like(weight) for weight in weights]

    def penalty():
        return r1_penalty(critic, real, gamma=5.0, interval=16)

    gradients = torch.autograd.grad(penalty(), weights)
    slope = sum((gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True)).item()
    values, small = [], 1e-6
    for sign in (1, -2):
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight += sign * small * direction
        values.append(penalty().item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * small), rel=1e-5)


class Kept:
    """A tensor that a graph keeps for a backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_no_graph_of_the_penalty_outlives_its_backward_pass():
    critic, real, kept, inputs = PatchCritic(base_width=4, num_layers=1), torch.randn(2, 3, 2, 8, 8), [], []

    def keep(tensor):
        box = Kept(tensor)
        kept.append(weakref.ref(box))
        return box

    def watched(pixels):
        inputs.append(weakref.ref(pixels))
        return critic(pixels)

    gc.collect()
    gc.disable()  # what only a collection frees would pile up until one comes
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda box: box.tensor):
            penalty = r1_penalty(watched, real, gamma=5.0, interval=16)
        assert inputs[0]() is not None
        assert any(reference() is not None for reference in kept)
        penalty.backward()
        with pytest.raises(RuntimeError, match="second time"):
            penalty.backward()
        del penalty
        assert inputs[0]() is None
        assert not [reference for reference in kept if reference() is not None]
    finally:
        gc.enable()
    assert not real.requires_grad and real.grad is None
    gradients = [parameter.grad for parameter in critic.parameters() if parameter.grad is not None]
    assert gradients and not any(gradient.requires_grad for gradient in gradients)


# Adaptive weight


def losses_of(layer, slope):
    """Reconstruction with gradient (3, 4), of norm 5, and a generator with gradient ``slope`` times (0, 1)."""
    return (layer * torch.tensor([3.0, 4.0])).sum(), slope * layer[1]


def adaptive_weight(rebuilt, adversarial, layer, **options):
    gradients = (torch.autograd.grad(loss, layer, retain_graph=True)[0] for loss in (rebuilt, adversarial))
    return adaptive_scale(*gradients, **options)


@pytest.mark.parametrize("slope", [2.0, -2.0])
def test_adaptive_weight_is_the_ratio_of_norms(slope):
    layer = nn.Parameter(torch.randn(2))
    weight = adaptive_weight(*losses_of(layer, slope), layer)
    assert weight.item() == pytest.approx(5 / (2 + 1e-4), rel=1e-6)
    assert not weight.requires_grad and weight.dtype == torch.float32
    assert layer.grad is None


def test_adaptive_weight_makes_both_pull_alike_through_a_decoder():
    decoder, latents, wanted = nn.Conv3d(4, 3, 1), torch.randn(2, 4, 2, 6, 6), torch.randn(2, 3, 2, 6, 6)
    found = decoder(latents)
    rebuilt, adversarial = reconstruction(found, wanted), hinge_generator(found.square())
    weight = adaptive_weight(rebuilt, adversarial, decoder.weight)
    pulls = []
    for loss in (rebuilt, weight * adversarial):
        decoder.zero_grad()
        loss.backward(retain_graph=True)
        pulls.append(decoder.weight.grad.norm().item())
    assert pulls[0] == pytest.approx(pulls[1], rel=1e-2)


def test_adaptive_weight_stays_within_its_limits():
    layer = nn.Parameter(torch.randn(2))
    rebuilt, _ = losses_of(layer, 1.0)
    # 5 / 1e-4 is 50,000.
    assert adaptive_weight(rebuilt, 0 * layer.sum(), layer).item() == 1e4
    assert adaptive_weight(rebuilt, 0 * layer.sum(), layer, most=7.0).item() == 7.0
    assert adaptive_weight(0 * layer.sum(), layer.sum(), layer).item() == 0
    assert adaptive_weight(0 * layer.sum(), 0 * layer.sum(), layer).item() == 0
    for slope in (-3.0, 1e-6, 1e6):
        assert 0 <= adaptive_weight(-rebuilt, losses_of(layer, slope)[1], layer).item() <= 1e4


def test_adaptive_weight_in_16_bits_is_of_exact_norms():
    # 100,000 gradients of 1: bfloat16 and float16 cannot count so far, and float16 not even hold the square.
    layer = nn.Parameter(torch.zeros(100_000, dtype=torch.float16))
    weight = adaptive_weight((3 * layer.float()).sum(), layer.float().sum(), layer)
    assert weight.item() == pytest.approx(3.0, rel=1e-5)
    assert weight.dtype == torch.float32
