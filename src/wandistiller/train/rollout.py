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
    empty_text: Tensor | None = None,
    empty_share: float = 0.0,
    asks_in_step: bool = False,
) -> Records:
    """Draw pictures for captions and return one record for each of them and each step.

    ``draw`` is the number of the noise that they come from. ``scale`` guides the way; the records' targets are guided only if
    the student is to learn that. For an ``empty_share`` of the records the teacher is asked on the way, but without the
    caption (``empty_text``): where guidance will ask the student. ``asks_in_step`` is for a teacher whose ranks have to ask as
    often as each other.
    """
    generators = [sample_generator(seed, draw, item) for item in items]
    noise = torch.stack([torch.randn(latent_shape, generator=generator) for generator in generators])
    drops = iter(torch.stack([torch.rand(num_steps, generator=generator) < empty_share for generator in generators], dim=1))
    numbers = torch.tensor(items)
    draws = torch.full_like(numbers, draw)
    found: list[Records] = []

    def velocity(noisy: Tensor, sigma: float, timestep: float) -> Tensor:
        sigmas = torch.full((len(items),), sigma, device=device)
        answer = teacher.answer(noisy, sigmas, text, scale=scale)
        target = answer.velocity if learns_guided else answer.plain
        dropped = next(drops)
        if empty_text is not None and (dropped.any() or asks_in_step):
            rows = (dropped.nonzero().flatten() if dropped.any() else torch.zeros(1, dtype=torch.long)).to(device)
            without = teacher.answer(noisy[rows], sigmas[rows], empty_text.to(device).expand(len(rows), -1, -1)).plain
            target = target.index_copy(0, rows, without) if dropped.any() else target
        found.append(Records(noisy.cpu(), sigmas.cpu(), target.cpu(), numbers, draws, dropped))
        return answer.velocity

    chosen = SOLVERS[solver]
    integrate(chosen.steps, velocity, noise.to(device), chosen.schedule(num_steps, shift))
    return join_records(found)
