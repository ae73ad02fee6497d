"""``plan --verify``: predicted against measured, by phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from wandistiller.errors import UsageError
from wandistiller.memory.estimates import Phase, margin
from wandistiller.plan.planner import Plan
from wandistiller.plan.ranking import seconds_text
from wandistiller.plan.trial import Measured, try_out


@dataclass(frozen=True)
class Comparison:
    """A phase as it was predicted and as it was."""

    phase: Phase
    measured: Measured

    @property
    def is_within(self) -> bool:
        """Whether no more was held than the prediction and its margin."""
        return self.measured.reserved <= self.phase.reserved + margin(self.phase.reserved)

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        predicted, measured = self.phase, self.measured
        return {
            "phase": predicted.name,
            "is_within": self.is_within,
            "allocated": [int(predicted.peak), int(measured.allocated)],
            "reserved": [int(predicted.reserved), int(measured.reserved)],
            "page_locked": [int(predicted.total("page-locked")), int(measured.page_locked)],
            "seconds": [predicted.seconds, measured.seconds],
        }


def check_can_verify() -> None:
    """Raise ``UsageError`` where no steps can be taken."""
    if not torch.cuda.is_available():
        raise UsageError("--verify takes real steps, and there is no GPU here.", fix="Run it on the machine that you plan for.")


def verify(plan: Plan) -> list[Comparison]:
    """Take a few real steps of every phase of the best plan that can be tried, and print both figures."""
    if plan.best is None:
        raise UsageError("There is nothing to verify: nothing fits.", fix="Take a smaller model, or a larger machine.")
    device = torch.device("cuda", torch.cuda.current_device())
    room = plan.hardware.room
    total = torch.cuda.get_device_properties(device).total_memory
    # Where the plan is for a smaller card, this process gets no more than that card has.
    torch.cuda.set_per_process_memory_fraction(min(room / total, 1.0), device)
    try:
        tried = [phase for phase in plan.best.estimate.phases if phase.work is not None]
        return [Comparison(phase, try_out(phase.work, device)) for phase in tried]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def show_comparisons(found: list[Comparison], console: Console | None = None) -> None:
    """Print a table of both figures."""
    table = Table(title="Predicted and measured", title_justify="left")
    for name in ("phase", "in use", "reserved", "page-locked", "step"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for each in found:
        phase, measured = each.phase, each.measured
        table.add_row(
            phase.name,
            f"{phase.peak} / {measured.allocated}",
            f"{phase.reserved} / {measured.reserved}",
            f"{phase.total('page-locked')} / {measured.page_locked}",
            f"{seconds_text(phase.seconds)} / {seconds_text(measured.seconds)}",
        )
    (console or Console(emoji=False)).print(table)
