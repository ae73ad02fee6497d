"""Pictures and clips drawn while training, so that one sees what the loss does not say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from wandistiller.data.media import to_bytes, write_clip, write_picture
from wandistiller.train.callbacks import EverySoOften
from wandistiller.train.drawing import Decode, Drawing, draw
from wandistiller.train.ema import MovingAverage, in_use
from wandistiller.train.method import Role

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop


class DrawSamples(EverySoOften):
    """Draws every so often and at the end, each rank its share of the prompts, with the average where there is one."""

    what = "the samples"

    def __init__(
        self,
        role: Role,
        drawing: Drawing,
        decode: Decode,
        folder: Path,
        *,
        fps: int,
        every: int,
        average: MovingAverage | None = None,
    ) -> None:
        super().__init__(every)
        self._role = role
        self._drawing = drawing
        self._decode = decode
        self._folder = folder
        self._fps = fps
        self._average = average

    def act(self, loop: Loop) -> None:
        drawing = self._drawing
        turns = loop.ranks.turns(len(drawing.prompts))
        how = {"device": loop.device, "precision": loop.options.precision, "on_step": loop.heed_signals}
        with in_use(self._average):
            # One at a time: users' models fill the card.
            drawn = [draw(self._role.model, drawing, [index], **how)[0] for index, _ in turns]
        decoded = iter(self._decode([latents for latents, (_, counts) in zip(drawn, turns, strict=True) if counts]))
        for index, counts in turns:
            loop.heed_signals()
            if counts:
                self._write(index, next(decoded), loop.step)
        loop.ranks.wait_long()

    def _write(self, index: int, pixels: Tensor, step: int) -> None:
        drawing = self._drawing
        settings = {"prompt": drawing.prompts[index], "step": step, "seed": drawing.seed, "steps": drawing.num_steps}
        name = f"{index:02d}-{_slug(drawing.prompts[index])}"
        folder, frames = self._folder / f"step-{step:08d}", to_bytes(pixels)
        if len(frames) == 1:
            write_picture(folder / f"{name}.png", frames, settings)
        else:
            write_clip(folder / f"{name}.mp4", frames, self._fps, settings)


def _slug(text: str) -> str:
    """Return a prompt as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "empty"
