"""The sigmas that a sampler visits.

Two schedules are in use for Wan, and a checkpoint is sampled best with the one it is shipped with:

- ``euler_schedule``, as diffusers' ``FlowMatchEulerDiscreteScheduler`` makes it;
- ``unipc_schedule``, as diffusers' ``UniPCMultistepScheduler`` with ``use_flow_sigmas`` does, which is what the released
  Wan pipelines carry. It starts a hair below 1, where the logarithms in UniPC stay finite, and tells the model whole
  timesteps, rounded down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from wandistiller.flow.path import NUM_TIMESTEPS

SigmaT = TypeVar("SigmaT", float, Tensor)


@dataclass(frozen=True)
class Schedule:
    """``num_steps + 1`` falling sigmas, the last exactly 0, and the timestep that the model is told at each but the last."""

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sigmas) != len(self.timesteps) + 1 or self.sigmas[-1] != 0.0:
            raise ValueError(f"A schedule ends at sigma 0 and has one timestep a step: {self.sigmas}, {self.timesteps}")

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)


def shift(sigma: SigmaT, amount: float) -> SigmaT:
    """Move sigmas towards noise: larger pictures and longer clips want more of the steps there."""
    return amount * sigma / (1 + (amount - 1) * sigma)


def unshift(sigma: SigmaT, amount: float) -> SigmaT:
    """Undo ``shift``."""
    return shift(sigma, 1 / amount)


def euler_schedule(num_steps: int, amount: float = 1.0) -> Schedule:
    """Return evenly spaced sigmas, shifted.

    The spacing ends at the *shifted* smallest training sigma and everything is then shifted once more. That is what
    diffusers does, so it is what checkpoints have been judged by.
    """
    smallest = shift(1 / NUM_TIMESTEPS, amount)
    sigmas = [shift(sigma, amount) for sigma in _linspace(1.0, smallest, num_steps)]
    return Schedule((*sigmas, 0.0), tuple(NUM_TIMESTEPS * sigma for sigma in sigmas))


def unipc_schedule(num_steps: int, amount: float = 1.0) -> Schedule:
    """Return evenly spaced sigmas, shifted, with the first kept below 1 and whole timesteps."""
    sigmas = [shift(sigma, amount) for sigma in _linspace(1.0, 1 / NUM_TIMESTEPS, num_steps + 1)[:-1]]
    if abs(sigmas[0] - 1.0) < _BELOW_ONE:
        sigmas[0] -= _BELOW_ONE
    return Schedule((*sigmas, 0.0), tuple(float(int(NUM_TIMESTEPS * sigma)) for sigma in sigmas))


_BELOW_ONE = 1e-6


def _linspace(start: float, stop: float, count: int) -> list[float]:
    step = (stop - start) / (count - 1) if count > 1 else 0.0
    return [start + index * step for index in range(count - 1)] + ([stop] if count > 1 else [start])
