"""Students of the procedural world and their marks: distilled, drawn beside their teacher, judged."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from wandistiller import api
from wandistiller.config.distill import DistillConfig
from wandistiller.config.report import ReportConfig
from wandistiller.data.judge import Marks


@dataclass(frozen=True)
class Judged:
    """What became of one student: shares of attributes that are right, its own and its teacher's."""

    what: str
    teacher: dict[str, float]
    student: dict[str, float]
    seconds: float
    """Of the whole distillation, encoding and asking the teacher included."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The student's marks as a share of the teacher's; not a number if that has none."""
        return self.student["overall"] / self.teacher["overall"] if self.teacher["overall"] else math.nan

    def __str__(self) -> str:
        kinds = " ".join(f"{kind} {value:.3f}" for kind, value in self.student.items())
        return f"{self.what:28} {self.share:6.1%} of the teacher's {self.teacher['overall']:.3f}: {kinds}, {self.seconds:.0f} s"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "share": self.share}


def distil(config: DistillConfig) -> float:
    """Distil and return the seconds that it took."""
    started = time.perf_counter()
    api.distill(config)
    return time.perf_counter() - started


def judge_run(what: str, config: DistillConfig, report: ReportConfig, seconds: float) -> Judged:
    """Let teacher and student of a run draw the same captions from the same noise, and mark both."""
    marks = api.report(replace(report, run=config.output_dir)).marks
    return Judged(what, shares(marks["teacher"]), shares(marks["student"]), seconds)


def shares(marks: Marks) -> dict[str, float]:
    return {**marks.shares, "overall": marks.overall}
