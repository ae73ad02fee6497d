"""Marks while training on the procedural world: captions are drawn, and its judge says what of each is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wandistiller.data.judge import KINDS, Marks, judge
from wandistiller.data.media import to_bytes
from wandistiller.terminal import say
from wandistiller.train.callbacks import EverySoOften
from wandistiller.train.drawing import Decode, Drawing, draw
from wandistiller.train.ema import MovingAverage, in_use
from wandistiller.train.method import Role
from wandistiller.train.metrics import WriteMetrics

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop


class MeasureMarks(EverySoOften):
    """Writes ``marks/overall`` and one share for each kind of attribute; ranks share the captions."""

    what = "the marks of held-out captions"

    def __init__(
        self,
        role: Role,
        drawings: Sequence[Drawing],
        decode: Decode,
        metrics: WriteMetrics,
        *,
        every: int,
        average: MovingAverage | None = None,
        at_once: int = 1,
    ) -> None:
        """``drawings`` has one entry for each size of picture or clip, drawn so many together; their prompts are captions of
        the world."""
        super().__init__(every)
        self._role = role
        self._drawings = drawings
        self._decode = decode
        self._metrics = metrics
        self._average = average
        self._at_once = at_once
        self.shares: dict[str, float] = {}

    def act(self, loop: Loop) -> None:
        marks = Marks()
        for prompts, latents in self._draw(loop):
            loop.heed_signals()
            for prompt, pixels in zip(prompts, self._decode(latents), strict=True):
                marks.add(judge(to_bytes(pixels), prompt))
        counted = [counts[kind] for counts in (marks.right, marks.total) for kind in KINDS]
        sums = loop.ranks.mean(torch.tensor(counted, dtype=torch.float64)).tolist()
        right, total = sums[: len(KINDS)], sums[len(KINDS) :]
        each = {f"marks/{kind}": a / b for kind, a, b in zip(KINDS, right, total, strict=True) if b}
        self.shares = {"marks/overall": sum(right) / sum(total), **each}
        self._metrics.write(loop, self.shares)
        if loop.ranks.is_first:
            say(f"Step {loop.step}, held-out captions: marks {self.shares['marks/overall']:.1%}")

    def _draw(self, loop: Loop) -> list[tuple[list[str], list[Tensor]]]:
        """Return captions and what was drawn of them, some together: those that count on this rank.

        All ranks have as many entries, of which one may be empty.
        """
        drawn = []
        with in_use(self._average):
            for drawing in self._drawings:
                mine = loop.ranks.turns(len(drawing.prompts))
                for start in range(0, len(mine), self._at_once):
                    some = mine[start : start + self._at_once]
                    how = {"device": loop.device, "precision": loop.options.precision, "on_step": loop.heed_signals}
                    latents = draw(self._role.model, drawing, [index for index, _ in some], **how)
                    counting = [number for number, (_, counts) in enumerate(some) if counts]
                    prompts = [drawing.prompts[some[number][0]] for number in counting]
                    drawn.append((prompts, [latents[number] for number in counting]))
        return drawn
