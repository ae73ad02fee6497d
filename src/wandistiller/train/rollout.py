"""The teacher's own trajectories: from noise to a picture with a solver, and what it said at every step of the way.

So the student learns where sampling will take it. On pure noise at every sigma, which needs no trajectories, a student learns
to answer questions that sampling never asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wandistiller.data.loader import sample_generator
from wandistiller.data.teacher_records import Records, join_records
from wandistiller.flow.solver import SOLVERS, integrate
from wandistiller.train.teacher import Teaches


def roll_out(
    teacher: Teaches,
    text: Tensor,
    items: Sequence[int],
    latent_shape: tuple[int, int, int, int],
    *,
    solver: str,
    num_steps: int,
    shift: float,
    scale: float,
    learns_guided: bool,
    seed: int,
    draw: int,
    device: torch.device,
) -> Records:
    """Draw pictures for captions and return one record for each of them and each step.

    ``draw`` is the number of the noise that they come from. ``scale`` guides the way; the records' targets are guided only if
    the student is to learn that.
    """
    noise = torch.stack([torch.randn(latent_shape, generator=sample_generator(seed, draw, item)) for item in items])
    numbers = torch.tensor(items)
    draws = torch.full_like(numbers, draw)
    found: list[Records] = []

    def velocity(noisy: Tensor, sigma: float, timestep: float) -> Tensor:
        sigmas = torch.full((len(items),), sigma, device=device)
        answer = teacher.answer(noisy, sigmas, text, scale=scale)
        target = answer.velocity if learns_guided else answer.plain
        found.append(Records(noisy.cpu(), sigmas.cpu(), target.cpu(), numbers, draws))
        return answer.velocity

    chosen = SOLVERS[solver]
    integrate(chosen.steps, velocity, noise.to(device), chosen.schedule(num_steps, shift))
    return join_records(found)
