"""What a model in training draws for given captions: the sampler's own solver and guidance, several samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wandistiller.flow.guidance import guide, needs_unconditional
from wandistiller.flow.solver import SOLVERS
from wandistiller.models.channel_adapter import ChannelAdapter
from wandistiller.train.optimisation import MixedPrecision, autocast

Decode = Callable[[Sequence[Tensor]], Iterable[Tensor]]
"""Turns normalised latents, one sample each, into pixels (channels, frames, height, width) from -1 to 1, one by one."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What to draw and how."""

    prompts: Sequence[str]
    text: Tensor
    """(prompts, tokens, width)"""
    empty_text: Tensor
    """(tokens, width)"""
    latent_shape: tuple[int, int, int, int]
    """Of the noise, which ``adapter``, if there is one, brings into the model's channels."""
    num_steps: int
    shift: float
    solver: str
    cfg_scale: float
    seed: int
    dtype: torch.dtype
    adapter: ChannelAdapter | None = None
    numbers: Sequence[int] | None = None
    """Which of all that are drawn the prompts are, where some are of other shapes; None if these are all."""

    def number(self, index: int) -> int:
        """Return which of all that are drawn a prompt is: its noise and its file go by it."""
        return index if self.numbers is None else self.numbers[index]


@torch.no_grad()
def draw(
    model: nn.Module,
    drawing: Drawing,
    indices: Sequence[int],
    *,
    device: torch.device,
    precision: MixedPrecision,
    on_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the latents of some of the prompts, computed together; each has noise of its own, whoever it is drawn with.

    ``on_step`` is called after every step of the solver, and may end the drawing by raising.
    """
    text = drawing.text[list(indices)].to(device, drawing.dtype)
    empty = drawing.empty_text.to(device, drawing.dtype).expand(len(indices), -1, -1)
    seeds = [drawing.seed + drawing.number(index) for index in indices]
    noise = torch.stack(
        [torch.randn(drawing.latent_shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    ).to(device)
    if drawing.adapter is not None:
        noise = drawing.adapter.rotate(noise)

    def velocity(noisy: Tensor, sigma: float, timestep: float) -> Tensor:
        def predict(condition: Tensor) -> Tensor:
            times = torch.full((len(indices),), timestep, device=device)
            with autocast(precision, device, caches=False):  # else weights in 16 bits stay until the pass has ended
                predicted: Tensor = model(noisy.to(drawing.dtype), times, condition, return_dict=False)[0]
            return predicted.float()

        found = predict(text)
        return guide(found, predict(empty), drawing.cfg_scale) if needs_unconditional(drawing.cfg_scale) else found

    solver = SOLVERS[drawing.solver]
    was_training = model.training
    model.eval()
    latents = noise
    try:
        for latents in solver.steps(velocity, noise, solver.schedule(drawing.num_steps, drawing.shift)):
            on_step()
    finally:
        model.train(was_training)
    return latents
