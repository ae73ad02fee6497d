"""Solvers of the flow's differential equation, as generators over any velocity function.

A solver takes a velocity function, the noise to start from and a ``Schedule``, and yields the noisy sample after every
step; the last one is at sigma 0. Whoever only wants that calls ``integrate``. States between the steps belong to the
generator, so two samplings never disturb each other.

The velocity function is called as ``velocity(noisy, sigma, timestep)``; one that has no use for the timestep ignores it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from wandistiller.flow.path import data_from_velocity
from wandistiller.flow.schedule import Schedule, euler_schedule, unipc_schedule

Velocity = Callable[[Tensor, float, float], Tensor]
Steps = Callable[[Velocity, Tensor, Schedule], Iterator[Tensor]]


@dataclass(frozen=True)
class Solver:
    """A way to step and the schedule that goes with it."""

    steps: Steps
    schedule: Callable[[int, float], Schedule]


SOLVERS: dict[str, Solver] = {}


def register_solver(name: str, schedule: Callable[[int, float], Schedule]) -> Callable[[Steps], Steps]:
    """Make a stepping function available to the command line under ``name``."""

    def register(steps: Steps) -> Steps:
        SOLVERS[name] = Solver(steps, schedule)
        return steps

    return register


def integrate(steps: Steps, velocity: Velocity, noise: Tensor, schedule: Schedule) -> Tensor:
    """Run a solver to sigma 0 and return the data it arrives at."""
    noisy = noise
    for noisy in steps(velocity, noise, schedule):
        pass
    return noisy


@register_solver("euler", euler_schedule)
def euler(velocity: Velocity, noise: Tensor, schedule: Schedule) -> Iterator[Tensor]:
    """Step along the velocity: first order, exact where paths are straight."""
    noisy = noise
    for index, timestep in enumerate(schedule.timesteps):
        sigma, next_sigma = schedule.sigmas[index : index + 2]
        noisy = noisy + (next_sigma - sigma) * velocity(noisy, sigma, timestep)
        yield noisy


@register_solver("unipc", unipc_schedule)
def unipc(velocity: Velocity, noise: Tensor, schedule: Schedule) -> Iterator[Tensor]:
    """Predict with the last two data predictions, then correct: third order at one velocity a step.

    UniPC-2 (Zhao et al. 2023) in its B2 form on data predictions, which the released Wan pipelines sample with.
    ``lam`` is the logarithm of the signal-to-noise ratio, the method's own time.
    """
    # diffusers keeps sigmas in float32, and close to 1 the logarithm of 1 - sigma magnifies that rounding.
    sigmas = [_float32(sigma) for sigma in schedule.sigmas]
    lam = [_log_signal_to_noise(sigma) for sigma in sigmas]
    predictions: list[Tensor] = []
    noisy = before = noise
    order = 0
    for index, timestep in enumerate(schedule.timesteps):
        prediction = data_from_velocity(noisy, velocity(noisy, sigmas[index], timestep), sigmas[index])
        if order:
            noisy = _unic(before, prediction, predictions, sigmas, lam, index, order)
        predictions = [*predictions[-1:], prediction]
        before = noisy
        # The first step has no history, and the last one jumps to infinite lam: both are first order.
        order = min(2, index + 1, schedule.num_steps - index)
        noisy = _unip(before, predictions, sigmas, lam, index, order)
        yield noisy


def _unip(noisy: Tensor, predictions: list[Tensor], sigmas: list[float], lam: list[float], index: int, order: int) -> Tensor:
    """Predict the sample at ``sigmas[index + 1]`` from the one at ``sigmas[index]``."""
    target = index + 1
    alpha, step = 1 - sigmas[target], lam[target] - lam[index]
    change = alpha * math.expm1(-step)
    result = sigmas[target] / sigmas[index] * noisy - change * predictions[-1]
    if order == 2:
        ratio = (lam[index - 1] - lam[index]) / step
        result = result - change * 0.5 * (predictions[-2] - predictions[-1]) / ratio
    return result


def _unic(
    before: Tensor,
    prediction: Tensor,
    predictions: list[Tensor],
    sigmas: list[float],
    lam: list[float],
    index: int,
    order: int,
) -> Tensor:
    """Correct the sample at ``sigmas[index]``, now that the data prediction there is known."""
    start = index - 1
    alpha, step = 1 - sigmas[index], lam[index] - lam[start]
    change = alpha * math.expm1(-step)
    result = sigmas[index] / sigmas[start] * before - change * predictions[-1]
    difference = prediction - predictions[-1]
    if order == 1:
        return result - change * 0.5 * difference
    ratio = (lam[start - 1] - lam[start]) / step
    phi_2 = math.expm1(-step) / -step - 1
    phi_3 = phi_2 / -step - 0.5
    first, second = phi_2 / math.expm1(-step), 2 * phi_3 / math.expm1(-step)
    weight_past = (first - second) / (1 - ratio)
    weight_now = first - weight_past
    return result - change * (weight_past * (predictions[-2] - predictions[-1]) / ratio + weight_now * difference)


def _log_signal_to_noise(sigma: float) -> float:
    return math.log(1 - sigma) - math.log(sigma) if sigma > 0 else math.inf


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
