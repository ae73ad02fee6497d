"""What the judge of the procedural world says about drawings whose prompts are its captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from wandistiller.data.judge import Finding, Marks, Verdict, judge
from wandistiller.data.world import parse_caption
from wandistiller.errors import UsageError


def judge_drawings(clips: Sequence[np.ndarray], prompts: Sequence[str]) -> list[Verdict | None]:
    """Judge each drawing; None where the prompt is no caption of the world."""
    return [judge(frames, prompt) if is_caption(prompt) else None for frames, prompt in zip(clips, prompts, strict=True)]


def is_caption(prompt: str) -> bool:
    """Say whether the judge can read a prompt."""
    try:
        parse_caption(prompt)
    except UsageError:
        return False
    return True


def count_marks(verdicts: Sequence[Verdict | None]) -> Marks | None:
    """Add verdicts up; None if there are none."""
    judged = [verdict for verdict in verdicts if verdict is not None]
    marks = Marks()
    for verdict in judged:
        marks.add(verdict)
    return marks if judged else None


@dataclass(frozen=True)
class Words:
    """A piece of a caption, and what the judge found of it; None for words between attributes."""

    text: str
    finding: Finding | None = None


def caption_words(caption: str, verdict: Verdict) -> Iterator[Words]:
    """Yield a caption in pieces, each attribute with its finding.

    That nothing moves is left unsaid in captions; where it was judged and is wrong, it is added.
    """
    scene, findings = parse_caption(caption), iter(verdict.findings)
    for order in range(len(scene.things)):
        yield Words(" and a " if order else "a ")
        for between in (" ", " ", " at the ", ""):
            yield _attribute(next(findings))
            yield Words(between)
    yield Words(" on a ")
    yield _attribute(next(findings))
    yield Words(" background")
    motion = next(findings, None)
    if scene.motion != "still":
        yield Words(f", the {scene.things[0].colour} {scene.things[0].shape} moves ")
        yield _attribute(motion) if motion is not None else Words(scene.motion)
    elif motion is not None and not motion.is_right:
        yield Words(", ")
        yield _attribute(motion)


def _attribute(finding: Finding) -> Words:
    return Words(finding.expected, finding)
