"""What a plan says of a smaller card, tried on a process that gets no more than that card has.

python benchmarks/capped.py --output benchmarks/results

Each job is planned for a card of so many gigabytes. All phases of the plan that is said to fit must run under a hard limit of
that size; the largest phase of the job as it was asked for, where its tensors alone are said to need more than the card and the
margin, must run out of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import DEVICE
from streaming import limit_memory

from wandistiller.cli.main import parse
from wandistiller.memory.estimates import Estimate, margin
from wandistiller.plan.planner import Plan, make_plan
from wandistiller.plan.ranking import flags
from wandistiller.plan.trial import try_out
from wandistiller.plan.trial_steps import Work

GIB = 2**30
VIDEO_5B = "--width 1280 --height 704 --frames 121"
VIDEO = "--width 832 --height 480 --frames 81"
IMAGE = "--width 832 --height 480 --frames 1"
JOBS = [
    (f"sample --model wan2.2-5b {VIDEO_5B}", 8),
    (f"sample --model wan2.1-14b {VIDEO}", 12),
    (f"train --model wan2.1-1.3b {VIDEO} --lora-rank 32", 12),
    (f"train --model wan2.1-1.3b {IMAGE} --batch-size 8", 16),
    (f"train --model wan2.2-5b {VIDEO_5B} --lora-rank 32", 24),
    (f"train --model wan2.1-1.3b {VIDEO}", 12),
]


@dataclass(frozen=True)
class Row:
    """What was said of a job on a card, and what became of it."""

    job: str
    card_gib: float
    chosen: str
    predicted_gib: float
    measured_gib: float | None
    """None where it did not run."""
    asked_gib: float
    """What the tensors of the job as asked for need."""
    asked_must_fail: bool
    asked_failed: bool | None
    """None where it was not tried."""

    @property
    def is_right(self) -> bool:
        return self.measured_gib is not None and self.asked_must_fail in (False, self.asked_failed)

    def __str__(self) -> str:
        ran = "DID NOT RUN" if self.measured_gib is None else f"ran with {self.measured_gib:.2f}"
        asked = {None: "not tried", True: "ran out of memory", False: "ran"}[self.asked_failed]
        return (
            f"{self.job:60} on {self.card_gib:.0f} GiB: {self.chosen or 'as asked for'}: "
            f"said {self.predicted_gib:.2f} GiB, {ran}; "
            f"as asked for: tensors of {self.asked_gib:.2f} GiB, {asked}{'' if self.is_right else '  WRONG'}"
        )


def works(estimate: Estimate) -> list[Work]:
    """Return what can be tried of a job, from the phase that needs most."""
    phases = sorted(estimate.phases, key=lambda phase: phase.peak, reverse=True)
    return [phase.work for phase in phases if phase.work is not None]


def runs(phases: list[Work], limit: int) -> float | None:
    """Return the gigabytes that were held, or None where the limit was not enough."""
    limit_memory(limit)
    try:
        return max(try_out(work, DEVICE, num_steps=1).reserved for work in phases) / GIB
    except torch.OutOfMemoryError:
        return None
    finally:
        limit_memory(None)


def plan_for(job: str, card: float, ram: str) -> Plan:
    request = parse("plan", [*job.split(), "--gpu", f"{card}GiB", "--ram", ram, "--card", "h200"])
    request.check()
    return make_plan(request)


def try_plan(job: str, card: float, ram: str) -> Row:
    plan = plan_for(job, card, ram)
    if plan.best is None:
        sys.exit(f"{job}: nothing fits on {card} GiB.")
    asked, room = plan.asked.estimate, plan.hardware.room
    must_fail = asked.in_use > room + margin(room)
    return Row(
        job,
        card,
        flags(plan.best),
        plan.best.estimate.device / GIB,
        runs(works(plan.best.estimate), room),
        asked.in_use / GIB,
        must_fail,
        runs(works(asked)[:1], room) is None if must_fail else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--ram", default="110GiB")
    parser.add_argument("--plan-only", action="store_true", help="say what would be tried; needs no card")
    arguments = parser.parse_args()
    rows = []
    for job, card in JOBS:
        if arguments.plan_only:
            plan = plan_for(job, card, arguments.ram)
            chosen = "nothing" if plan.best is None else f"{flags(plan.best)} {plan.best.estimate.device}"
            asked = plan.asked.estimate
            print(f"{job} on {card} GiB: {chosen}; as asked for {asked.in_use}, {type(works(asked)[0]).__name__}", flush=True)
            continue
        rows.append(try_plan(job, card, arguments.ram))
        print(rows[-1], flush=True)
        arguments.output.mkdir(parents=True, exist_ok=True)
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        kept = [{**asdict(row), "is_right": row.is_right} for row in rows]
        (arguments.output / "capped.json").write_text(json.dumps({**facts, "rows": kept}, indent=1) + "\n")
    if not all(row.is_right for row in rows):
        sys.exit("The planner was wrong.")


if __name__ == "__main__":
    main()
