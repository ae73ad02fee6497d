"""Flow matching against closed forms: on Gaussian data the best velocity and its loss are known."""

import pytest
import torch
from torch import nn

from wandistiller.data.loader import Batch
from wandistiller.train.method import Role
from wandistiller.train.methods.finetune import FlowMatching, PixelLoss

MEAN, STD = 0.7, 1.6


class BestGuess(nn.Module):
    """E[noise - data | noisy] for data from N(MEAN, STD), as a Wan transformer is called."""

    def __init__(self, sign: float = 1.0, scale: float = 1000.0):
        super().__init__()
        self.sign, self.scale = sign, scale

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict):
        sigma = (timestep / self.scale).view(-1, 1, 1, 1, 1)
        spread = (1 - sigma) ** 2 * STD**2 + sigma**2
        offset = hidden_states - (1 - sigma) * MEAN
        noise = sigma * offset / spread
        data = MEAN + (1 - sigma) * STD**2 * offset / spread
        return (self.sign * (noise - data),)


def batch_at(sigma, count=64, **more):
    generator = torch.Generator().manual_seed(1)
    shape = (count, 2, 3, 8, 8)
    tensors = {
        "latents": MEAN + STD * torch.randn(shape, generator=generator),
        "noise": torch.randn(shape, generator=generator),
        "sigma": torch.full((count,), sigma),
        "text": torch.zeros(count, 4, 8),
    }
    return Batch({**tensors, **more}, tuple(map(str, range(count))), 0, 0)


def least_loss(sigma):
    """Var[noise - data | noisy]."""
    spread = (1 - sigma) ** 2 * STD**2 + sigma**2
    return STD**2 + 1 - (sigma - (1 - sigma) * STD**2) ** 2 / spread


def method(model, **options):
    return FlowMatching(Role("student", model, is_trained=True), dtype=torch.float32, **options)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 0.5, 0.8, 1.0])
def test_the_best_velocity_has_the_least_loss(sigma):
    loss = method(BestGuess()).losses(batch_at(sigma)).total.item()
    # 24,576 numbers: the mean square is known to within a few per cent.
    assert loss == pytest.approx(least_loss(sigma), rel=0.05)


@pytest.mark.parametrize("wrong", [{"sign": -1.0}, {"scale": 500.0}])
@pytest.mark.parametrize("sigma", [0.3, 0.8])
def test_a_wrong_sign_or_time_costs(wrong, sigma):
    assert method(BestGuess(**wrong)).losses(batch_at(sigma)).total.item() > 1.01 * least_loss(sigma) + 0.01


class OneSample(nn.Module):
    """(noisy - data) / sigma with the data to be learnt: the exact velocity if there is one sample."""

    def __init__(self, shape):
        super().__init__()
        self.data = nn.Parameter(torch.zeros(shape))

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict):
        return ((hidden_states - self.data) / (timestep / 1000).view(-1, 1, 1, 1, 1),)


def test_one_sample_is_learnt_to_the_last_digit():
    torch.manual_seed(0)
    data = torch.randn(2, 1, 4, 4)
    flow, losses = method(OneSample(data.shape)), []
    optimiser = torch.optim.Adam(flow.student.model.parameters(), lr=0.05)
    for _ in range(400):
        sigma = torch.rand(8) * 0.9 + 0.1
        tensors = {"latents": data.expand(8, *data.shape), "noise": torch.randn(8, *data.shape), "sigma": sigma}
        losses.append(flow.losses(Batch({**tensors, "text": torch.zeros(8, 1, 1)}, ("x",) * 8, 0, 0)).total)
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[-1].item() < 1e-6 * losses[0].item()
    torch.testing.assert_close(flow.student.model.data, data, rtol=0, atol=1e-2)


def test_errors_of_each_sample_are_the_losses_parts():
    flow, batch = method(BestGuess()), batch_at(0.4, count=6)
    errors = flow.held_out_errors(batch.tensors)
    assert errors.shape == (6,)
    assert errors.mean().item() == pytest.approx(flow.losses(batch).total.item(), rel=1e-6)


def test_the_loss_in_pixels_is_of_the_predicted_data():
    """With a decoder that doubles, and the exact velocity of one sample, the pixels are right and the loss is 0."""
    data = torch.randn(1, 2, 1, 4, 4)
    model = OneSample(data.shape[1:])
    model.data.data = data[0].clone()
    flow = method(model, pixels=PixelLoss(lambda latents: 2 * latents, 0.5))
    batch = Batch(
        {"latents": data, "noise": torch.randn_like(data), "sigma": torch.tensor([0.5]), "text": torch.zeros(1, 1, 1)},
        ("x",),
        0,
        0,
    )
    assert flow.losses(batch).total.item() == pytest.approx(0, abs=1e-7)
    model.data.data = model.data.data + 0.1
    losses = flow.losses(batch)
    # Data off by 0.1: the velocity by 0.1 / 0.5, the pixels by 0.2, which counts half at sigma 0.5 and half by its weight.
    assert losses.metrics["pixel_loss"].item() == pytest.approx(0.2 * 0.5, rel=1e-4)
    assert losses.total.item() == pytest.approx(0.2**2 + 0.5 * 0.1, rel=1e-4)
    losses.total.backward()
    assert model.data.grad.abs().sum() > 0
