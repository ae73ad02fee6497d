"""Schedules, averages, rounding: against closed forms and PyTorch."""

import math

import pytest
import torch
from torch import nn

from wandistiller.errors import UsageError
from wandistiller.train.ema import MovingAverage
from wandistiller.train.optimisation import Optimisation, OptimiserOptions
from wandistiller.train.optimisers import OPTIMISERS, StochasticAdamW, make_optimiser, round_stochastically
from wandistiller.train.schedules import rate_factor

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("constant", 0, 0.2),
        ("constant", 3, 0.8),
        ("constant", 4, 1.0),
        ("constant", 99, 1.0),
        ("linear", 4, 1.0),
        ("linear", 54, 1 - 50 / 100),
        ("linear", 104, 0.0),
        ("cosine", 4, 1.0),
        ("cosine", 29, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 54, 0.5),
        ("cosine", 1000, 0.0),
    ],
)
def test_schedules(name, step, expected):
    assert rate_factor(name, step, warmup_steps=4, num_steps=104) == pytest.approx(expected, abs=1e-12)


def test_the_average_by_its_formula():
    model = nn.Module()
    model.x = parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    average, expected = MovingAverage(model, ["x"], decay=0.5), torch.tensor([1.0, 2.0])
    for step in range(1, 6):
        parameter.data = torch.tensor([float(step), -float(step)])
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * parameter.data
    torch.testing.assert_close(average.averages["x"], expected)
    with average.in_use():
        assert torch.equal(parameter.data, average.averages["x"])
    assert parameter.tolist() == [5.0, -5.0]


def test_master_copies_are_made_in_the_order_of_the_weights():
    """In which they lie in memory, of which PyTorch then holds the same in every run."""
    parameters = {f"weight {index}": nn.Parameter(torch.randn(2).bfloat16()) for index in range(20)}
    optimisation = Optimisation(parameters, OptimiserOptions(), "no", CPU)
    assert list(optimisation._masters) == list(parameters)


def test_stochastic_rounding_is_right_on_average():
    value = 1 + 2**-8 * 0.3  # bfloat16 has steps of 2**-7 above 1
    rounded = round_stochastically(torch.full((200_000,), value), torch.Generator().manual_seed(0)).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert rounded.double().mean().item() == pytest.approx(value, abs=4 * 2**-7 * math.sqrt(0.15 * 0.85 / 200_000))
    exact = torch.tensor([0.0, 1.0, -2.5, 3e38, -1e-30]).bfloat16().float()
    assert torch.equal(round_stochastically(exact).float(), exact)


def train(parameter, optimiser, steps=400):
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, 1.0)
        optimiser.step()
    return parameter


def test_small_updates_survive_in_16_bits():
    """400 updates of 1e-4 from 1.0: each alone is far below bfloat16's step of 0.0078."""
    lost = train(*_with(torch.optim.AdamW))
    assert lost.float().mean().item() == 1.0, "the plain way loses them all"
    stochastic = train(*_with(StochasticAdamW))
    assert stochastic.float().mean().item() == pytest.approx(0.96, abs=0.002)
    parameter = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
    options = OptimiserOptions(rate=1e-4, weight_decay=0.0, clip_norm=None)
    optimisation = Optimisation({"x": parameter}, options, "no", CPU)
    for step in range(400):
        parameter.grad = torch.full_like(parameter, 1.0)
        optimisation.step(step)
    assert parameter.float().mean().item() == pytest.approx(0.96, abs=0.004)


def _with(kind):
    parameter = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
    if kind is StochasticAdamW:
        return parameter, kind([parameter], rate=1e-4, weight_decay=0.0, betas=(0.9, 0.999), seed=1)
    return parameter, kind([parameter], lr=1e-4, weight_decay=0.0)


def test_stochastic_adamw_is_adamw_in_float32():
    torch.manual_seed(0)
    start, gradients = torch.randn(50), torch.randn(10, 50)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    first = StochasticAdamW([ours], rate=0.01, weight_decay=0.1, betas=(0.8, 0.95), seed=0)
    second = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, betas=(0.8, 0.95))
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    torch.testing.assert_close(ours, theirs)


def test_loss_scaling_gives_the_true_gradients():
    torch.manual_seed(0)
    start = torch.randn(20)
    results = []
    for precision in ("no", "fp16"):
        parameter = nn.Parameter(start.clone())
        optimisation = Optimisation({"x": parameter}, OptimiserOptions(rate=0.1, clip_norm=0.5), precision, CPU)
        for step in range(5):
            optimisation.backward((parameter * torch.arange(20.0)).square().mean())
            optimisation.step(step)
        results.append(parameter.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_a_step_whose_gradients_overflow_is_not_taken():
    parameter = nn.Parameter(torch.ones(3))
    optimisation = Optimisation({"x": parameter}, OptimiserOptions(rate=0.1), "fp16", CPU)
    before = optimisation._scaler.get_scale()
    optimisation.backward((parameter * 1e38).sum() * 1e38)
    optimisation.step(0)
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert optimisation._scaler.get_scale() < before


@pytest.mark.parametrize("name", OPTIMISERS)
def test_what_is_asked_for_reaches_every_optimiser(name):
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    [group] = make_optimiser(name, parameters, rate=0.5, weight_decay=0.25, betas=(0.8, 0.95)).param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert "betas" in group or name == "adafactor"
    assert tuple(group.get("betas", (0.8, 0.95))) == (0.8, 0.95)


def test_an_unknown_optimiser():
    with pytest.raises(UsageError, match="did you mean 'adamw'"):
        make_optimiser("adam", [nn.Parameter(torch.ones(1))], rate=1.0, weight_decay=0.0, betas=(0.9, 0.99))
