"""Pictures and clips drawn while training, so that one sees what the loss does not say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Drawn:
    """One of a drawing's prompts as latents."""

    drawing: Drawing
    index: int
    latents: Tensor
    counts: bool
    """Whether this rank keeps it; else another one does, and this one has drawn it to keep step."""


class DrawSamples(EverySoOften):
    """Draws every so often and at the end, each rank its share of the prompts, with the average where there is one."""

    what = "the samples"

    def __init__(
        self,
        role: Role,
        drawings: Sequence[Drawing],
        decode: Decode,
        folder: Path,
        *,
        fps: int,
        every: int,
        average: MovingAverage | None = None,
    ) -> None:
        """``drawings`` has one entry for each size of picture or clip."""
        super().__init__(every)
        self._role = role
        self._drawings = drawings
        self._decode = decode
        self._folder = folder
        self._fps = fps
        self._average = average

    def act(self, loop: Loop) -> None:
        drawn = self._draw(loop)
        decoded = iter(self._decode([each.latents for each in drawn if each.counts]))
        for each in drawn:
            loop.heed_signals()
            if each.counts:
                self._write(each, next(decoded), loop.step)
        loop.ranks.wait_long()

    def _draw(self, loop: Loop) -> list[_Drawn]:
        """Return what this rank draws of all sizes, so that the VAE is loaded once."""
        drawn = []
        how = {"device": loop.device, "precision": loop.options.precision, "on_step": loop.heed_signals}
        with in_use(self._average):
            for drawing in self._drawings:
                for index, counts in loop.ranks.turns(len(drawing.prompts)):
                    # One at a time: users' models fill the card.
                    drawn.append(_Drawn(drawing, index, draw(self._role.model, drawing, [index], **how)[0], counts))
        return drawn

    def _write(self, each: _Drawn, pixels: Tensor, step: int) -> None:
        drawing, prompt, frames = each.drawing, each.drawing.prompts[each.index], to_bytes(pixels)
        settings = {"prompt": prompt, "step": step, "seed": drawing.seed, "steps": drawing.num_steps}
        folder, name = self._folder / f"step-{step:08d}", f"{drawing.number(each.index):02d}-{_slug(prompt)}"
        if len(frames) == 1:
            write_picture(folder / f"{name}.png", frames, settings)
        else:
            write_clip(folder / f"{name}.mp4", frames, self._fps, settings)


def _slug(text: str) -> str:
    """Return a prompt as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "empty"
