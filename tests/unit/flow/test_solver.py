"""Solvers against a flow that is known in closed form, and against diffusers.

For data drawn from N(m, s^2) the noisy sample at sigma has variance v = (1 - sigma)^2 s^2 + sigma^2, the velocity field is
-m + (sigma - (1 - sigma) s^2) / v * (x - (1 - sigma) m), and the flow carries noise z to m + s z.
"""

import itertools
import math
from typing import get_args, get_type_hints

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from wandistiller.config.sample import SampleConfig
from wandistiller.flow.schedule import Schedule
from wandistiller.flow.solver import SOLVERS, integrate

MEAN, STD = 1.5, 0.4


def gaussian_velocity(noisy, sigma, timestep):
    variance = (1 - sigma) ** 2 * STD**2 + sigma**2
    return -MEAN + (sigma - (1 - sigma) * STD**2) / variance * (noisy - (1 - sigma) * MEAN)


def solve(name, num_steps, noise, shift=1.0):
    solver = SOLVERS[name]
    return integrate(solver.steps, gaussian_velocity, noise, solver.schedule(num_steps, shift))


@pytest.mark.parametrize("name", SOLVERS)
def test_it_lands_on_the_right_distribution(name):
    noise = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = solve(name, 400, noise)
    assert data.mean().item() == pytest.approx(MEAN, abs=0.01)
    assert data.std().item() == pytest.approx(STD, abs=0.01)


def error_inside(name, num_steps):
    """Return the error between sigma 0.9 and 0.1 with steps even in the log of signal to noise, UniPC's own time."""
    lam = [math.log(1 / 9) + 2 * math.log(9) * index / num_steps for index in range(num_steps + 1)]
    sigmas = [1 / (1 + math.exp(value)) for value in lam]
    exact = [
        (1 - sigma) * MEAN + math.sqrt((1 - sigma) ** 2 * STD**2 + sigma**2) * torch.linspace(-2, 2, 41, dtype=torch.float64)
        for sigma in (sigmas[0], sigmas[-1])
    ]
    steps = SOLVERS[name].steps(gaussian_velocity, exact[0], Schedule((*sigmas, 0.0), (0.0,) * len(sigmas)))
    reached = [next(steps) for _ in range(num_steps)][-1]
    return (reached - exact[1]).abs().max().item()


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("unipc", 3)])
def test_the_error_falls_as_theory_says(name, order):
    # UniPC with a predictor of order 2 converges with order 3 once corrected (Zhao et al. 2023, theorem 3.1).
    errors = [error_inside(name, num_steps) for num_steps in (20, 40, 80)]
    observed = [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(errors)]
    assert observed == pytest.approx([order, order], abs=0.15)


@pytest.mark.parametrize(("name", "num_steps", "bound"), [("euler", 40, 0.06), ("unipc", 40, 0.004)])
def test_a_usual_number_of_steps_is_enough(name, num_steps, bound):
    noise = torch.linspace(-2, 2, 41, dtype=torch.float64)
    assert (solve(name, num_steps, noise) - (MEAN + STD * noise)).abs().max().item() < bound


def test_euler_is_exact_for_a_single_data_point():
    data, noise = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    solver = SOLVERS["euler"]
    found = integrate(solver.steps, lambda noisy, sigma, timestep: (noisy - data) / sigma, noise, solver.schedule(7, 3.0))
    torch.testing.assert_close(found, data)


def curved(noisy, sigma, timestep):
    """A velocity that also depends on the timestep, as a model's does."""
    return torch.tanh(noisy.roll(1, -1)) * (1 + timestep / 1000) + 0.3 * noisy


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 25])
@pytest.mark.parametrize("name", SOLVERS)
def test_it_steps_as_diffusers_does(name, num_steps, shift):
    scheduler = {
        "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=shift),
        "unipc": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift),
    }[name]()
    scheduler.set_timesteps(num_steps)
    noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    expected = noise
    steps = iter(SOLVERS[name].steps(curved, noise, SOLVERS[name].schedule(num_steps, shift)))
    for timestep in scheduler.timesteps:
        expected = scheduler.step(curved(expected, None, float(timestep)), timestep, expected, return_dict=False)[0]
        torch.testing.assert_close(next(steps), expected, rtol=1e-5, atol=1e-5)


def test_the_choices_in_help_are_the_registry():
    choices = get_args(get_type_hints(SampleConfig)["solver"])
    assert set(choices) == {"auto", *SOLVERS}
