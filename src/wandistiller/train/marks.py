"""Marks while training on the procedural world: captions are drawn, and its judge says what of each is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

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

_AT_ONCE = 64


class MeasureMarks(EverySoOften):
    """Writes ``marks/overall`` and one share for each kind of attribute; ranks share the captions."""

    def __init__(
        self,
        role: Role,
        drawings: Sequence[Drawing],
        decode: Decode,
        metrics: WriteMetrics,
        *,
        every: int,
        average: MovingAverage | None = None,
    ) -> None:
        """``drawings`` has one entry for each size of picture or clip; their prompts are captions of the world."""
        super().__init__(every)
        self._role = role
        self._drawings = drawings
        self._decode = decode
        self._metrics = metrics
        self._average = average
        self.shares: dict[str, float] = {}

    def act(self, loop: Loop) -> None:
        marks = Marks()
        with in_use(self._average):
            for drawing in self._drawings:
                mine = loop.ranks.turns(len(drawing.prompts))
                for start in range(0, len(mine), _AT_ONCE):
                    some = mine[start : start + _AT_ONCE]
                    how = {"device": loop.device, "precision": loop.options.precision}
                    latents = draw(self._role.model, drawing, [index for index, _ in some], **how)
                    counting = [number for number, (_, counts) in enumerate(some) if counts]
                    found = self._decode([latents[number] for number in counting])
                    for index, pixels in zip((some[number][0] for number in counting), found, strict=True):
                        marks.add(judge(to_bytes(pixels), drawing.prompts[index]))
        counted = [counts[kind] for counts in (marks.right, marks.total) for kind in KINDS]
        sums = loop.ranks.mean(torch.tensor(counted, dtype=torch.float64)).tolist()
        right, total = sums[: len(KINDS)], sums[len(KINDS) :]
        each = {f"marks/{kind}": a / b for kind, a, b in zip(KINDS, right, total, strict=True) if b}
        self.shares = {"marks/overall": sum(right) / sum(total), **each}
        self._metrics.write(loop, self.shares)
        if loop.ranks.is_first:
            say(f"Step {loop.step}, held-out captions: marks {self.shares['marks/overall']:.1%}")
