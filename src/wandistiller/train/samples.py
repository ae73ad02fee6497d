"""Pictures and clips drawn while training, so that one sees what the loss does not say."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wandistiller.data.media import to_bytes, write_clip, write_picture
from wandistiller.flow.guidance import guide, needs_unconditional
from wandistiller.flow.solver import SOLVERS, integrate
from wandistiller.train.callbacks import Callback
from wandistiller.train.ema import MovingAverage
from wandistiller.train.method import Role
from wandistiller.train.optimisation import autocast

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop

Decode = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Turns normalised latents, one sample each, into pixels (channels, frames, height, width) from -1 to 1."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What to draw and how."""

    prompts: Sequence[str]
    text: Tensor
    """(prompts, 512, width)"""
    empty_text: Tensor
    """(512, width)"""
    latent_shape: tuple[int, int, int, int]
    num_steps: int
    shift: float
    solver: str
    cfg_scale: float
    fps: int
    seed: int
    dtype: torch.dtype


class DrawSamples(Callback):
    """Draws every so often and at the end, each rank its share of the prompts, with the average where there is one."""

    def __init__(
        self, role: Role, drawing: Drawing, decode: Decode, folder: Path, *, every: int, average: MovingAverage | None = None
    ) -> None:
        self._role = role
        self._drawing = drawing
        self._decode = decode
        self._folder = folder
        self._every = every
        self._average = average
        self._drawn_step = -1

    def stepped(self, loop: Loop) -> None:
        if self._every and loop.step % self._every == 0:
            self._draw(loop)

    def ended(self, loop: Loop) -> None:
        if self._drawn_step != loop.step:
            self._draw(loop)

    @torch.no_grad()
    def _draw(self, loop: Loop) -> None:
        self._drawn_step = loop.step
        drawing = self._drawing
        mine = range(loop.ranks.rank, len(drawing.prompts), loop.ranks.world_size)
        with self._average.in_use() if self._average is not None else nullcontext():
            latents = [self._integrate(loop, index) for index in mine]
        for index, pixels in zip(mine, self._decode(latents), strict=True):
            settings = {"prompt": drawing.prompts[index], "step": loop.step, "seed": drawing.seed, "steps": drawing.num_steps}
            name = f"{index:02d}-{_slug(drawing.prompts[index])}"
            folder, frames = self._folder / f"step-{loop.step:08d}", to_bytes(pixels)
            if len(frames) == 1:
                write_picture(folder / f"{name}.png", frames, settings)
            else:
                write_clip(folder / f"{name}.mp4", frames, drawing.fps, settings)
        loop.ranks.wait()

    def _integrate(self, loop: Loop, index: int) -> Tensor:
        drawing, model = self._drawing, self._role.model
        text, empty = (each.to(loop.device, drawing.dtype)[None] for each in (drawing.text[index], drawing.empty_text))
        noise = torch.randn((1, *drawing.latent_shape), generator=torch.Generator().manual_seed(drawing.seed + index))

        def velocity(noisy: Tensor, sigma: float, timestep: float) -> Tensor:
            def predict(condition: Tensor) -> Tensor:
                times = torch.full((1,), timestep, device=loop.device)
                with autocast(loop.options.precision, loop.device):
                    return model(noisy.to(drawing.dtype), times, condition, return_dict=False)[0].float()

            found = predict(text)
            return guide(found, predict(empty), drawing.cfg_scale) if needs_unconditional(drawing.cfg_scale) else found

        solver = SOLVERS[drawing.solver]
        was_training = model.training
        model.eval()
        latents = integrate(solver.steps, velocity, noise.to(loop.device), solver.schedule(drawing.num_steps, drawing.shift))
        model.train(was_training)
        return latents[0]


def _slug(text: str) -> str:
    """Return a prompt as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "empty"
