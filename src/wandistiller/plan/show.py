"""A plan as tables for people, or as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wandistiller.memory.estimates import PROCESS, Estimate, Phase, by_kind
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.step_limit import limit_of
from wandistiller.plan.planner import Plan, model_of
from wandistiller.plan.ranking import flags, ranking, reasons, seconds_text
from wandistiller.plan.search import Option
from wandistiller.units import Bytes

_MEANING = (
    "What there is at the worst moment, which adds up to what is in use; in brackets, the most at another moment. "
    "Reserved is what PyTorch holds then, with what it cannot use. "
    f"What fits is said with {Bytes(PROCESS)} of host memory more for each process itself."
)


class Compared(Protocol):
    """A phase as it was predicted and as it was."""

    def as_json(self) -> dict[str, Any]: ...


def show(plan: Plan, *, top: int, console: Console | None = None) -> None:
    """Print what the job takes as it was asked for, what fits best, and why the others do not."""
    console = console or Console(emoji=False)
    console.print(f"Planning {escape(_subject(plan))}, for {describe(plan.hardware)}", highlight=False)
    shown = plan.best or plan.asked
    console.print(_phases(shown.estimate, _title(plan, shown), plan.hardware))
    if shown.estimate.disk:
        kinds = ", ".join(f"{item.role} {item.kind} {item.size}" for item in shown.estimate.disk)
        console.print(f"On disk: {kinds}", highlight=False)
    if plan.fitting:
        console.print(ranking(plan, top))
    if plan.absent:
        console.print(f"Not here, so only a run will say whether they can be used: {escape(', '.join(plan.absent))}.")
    for reason in reasons(plan):
        console.print(escape(reason), highlight=False)
    if plan.command is not None:
        console.print("Run:")
        console.print(f"  {plan.command}", highlight=False, markup=False, soft_wrap=True)


def _subject(plan: Plan) -> str:
    """Return what is planned: the command, the model, and the samples of a step as they were asked for."""
    named = f"{plan.request.command} of {model_of(plan.request.job)}"
    samples = plan.asked.estimate.samples
    each = " on each card" if plan.hardware.num_ranks > 1 else ""
    return named if samples is None else f"{named}, {samples}{'' if plan.asked.estimate.is_once else f' a step{each}'}"


def describe(hardware: Hardware) -> str:
    """Return a machine in words."""
    nodes = f", {hardware.num_nodes} machines" if hardware.num_nodes > 1 else ""
    if hardware.card is None:
        return f"the CPU alone, with {hardware.host_memory} of memory{nodes}"
    count = f"{hardware.all_cards} x " if hardware.all_cards > 1 else ""
    known = f", speed by {hardware.card.rates_of}" if hardware.card.rates_of else ""
    return (
        f"{count}{hardware.card.name} ({hardware.room} for tensors{known}), {hardware.host_memory} of host memory, "
        f"bus {hardware.bus_rate / 1e9:.0f} GB/s, disk {hardware.disk_rate / 1e9:.3g} GB/s{nodes}"
    )


def as_json(plan: Plan, *, top: int, comparisons: Sequence[Compared] = ()) -> str:
    """Return a plan for programs, with what was measured of it; bytes are numbers."""
    content: dict[str, Any] = {
        "command": plan.request.command,
        "model": model_of(plan.request.job),
        "samples": None if plan.asked.estimate.samples is None else asdict(plan.asked.estimate.samples),
        "hardware": {
            "card": None if plan.hardware.card is None else plan.hardware.card.name,
            "cards": plan.hardware.all_cards,
            "machines": plan.hardware.num_nodes,
            "room": int(plan.hardware.room),
            "host_memory": int(plan.hardware.host_memory),
            "bus_rate": plan.hardware.bus_rate,
            "disk_rate": plan.hardware.disk_rate,
            "network_rate": plan.hardware.network_rate,
        },
        "asked": _option(plan.asked, plan.hardware),
        "fits": plan.best is not None,
        "plans": [_option(each, plan.hardware) for each in plan.ranked[:top]],
        "losers": [{"changes": dict(each.changes), "why": list(each.lacks)} for each in plan.losers],
        "untried": [{"changes": dict(each.way.changes), "why": each.why} for each in plan.untried],
        "not_here": list(plan.absent),
        "run": plan.command,
    }
    if comparisons:
        content["measured"] = [each.as_json() for each in comparisons]
    return json.dumps(content, indent=1)


def _title(plan: Plan, shown: Option) -> str:
    if plan.best is None:
        return "As asked for, which does not fit"
    return "As asked for" if not shown.changes else f"With {flags(shown)}"


def _phases(estimate: Estimate, title: str, hardware: Hardware) -> Table:
    table = Table(title=title, title_justify="left", caption=_MEANING, caption_justify="left")
    places = {"device": "card", "host": "host", "page-locked": "page-locked"} if hardware.card else {"device": "memory"}
    for name in ("phase", "what", *places.values()):
        table.add_column(name, justify="left" if name in ("phase", "what") else "right")
    for phase in estimate.phases if hardware.card else map(_all_in_memory, estimate.phases):
        for number, ((role, kind), cells) in enumerate(_rows(phase).items()):
            what = f"{role} {kind}".strip()
            sizes = [cells.get(where, "") for where in places]
            table.add_row(phase.name if number == 0 else "", what, *sizes)
        held = f"in use {phase.peak},\n[bold]reserved {phase.reserved}[/bold]"
        if phase.is_least:
            table.add_row("", "[bold]at least[/bold], which is hopeless", f"[bold]{phase.peak}[/bold]", end_section=True)
            continue
        exchange = f"; ranks exchange for {seconds_text(phase.exchange)} beside it" if phase.exchange else ""
        limit = limit_of(phase, hardware)
        limited = "" if limit is None else f", limited by {limit}"
        time = f"{seconds_text(phase.seconds)} {'a step' if phase.num_steps else 'each time'}{limited}{exchange}"
        table.add_row("", f"[bold]at most[/bold], {time}", held, end_section=True)
    return table


def _all_in_memory(phase: Phase) -> Phase:
    """Return a phase of a machine without a card, where all is in the same memory, as if it were all on a device."""
    items = tuple(replace(item, where="device") for item in phase.items)
    peak, reserved = (Bytes(size + phase.on_host) for size in (phase.peak, phase.reserved))
    return replace(phase, items=items, peak=peak, reserved=reserved)


def _rows(phase: Phase) -> dict[tuple[str, str], dict[str, str]]:
    """Return what there is at the worst moment, and in brackets the most that there is at another."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for (role, kind, where), item in by_kind(phase.items).items():
        now, most = str(item.at_peak or "-"), str(item.size)
        rows.setdefault((role, kind), {})[where] = now if now == most else f"{now} ({most})"
    return rows


def _option(option: Option, hardware: Hardware) -> dict[str, Any]:
    return {
        "changes": dict(option.changes),
        "fits": option.fits,
        "why_not": list(option.lacks),
        "costs_in_accuracy": list(option.way.costs),
        "seconds_per_step": _number(option.estimate.step_seconds),
        "seconds_compared": _number(option.seconds),
        "device": int(option.estimate.device),
        "host": int(option.estimate.host),
        "page_locked": int(option.estimate.page_locked),
        "phases": [
            {
                "name": phase.name,
                "allocated": int(phase.peak),
                "reserved": int(phase.reserved),
                "seconds": _number(phase.seconds),
                "is_least": phase.is_least,
                "limited_by": limit_of(phase, hardware),
                "exchange_seconds": phase.exchange,
                "items": [
                    {
                        "role": item.role,
                        "kind": item.kind,
                        "where": item.where,
                        "bytes": int(item.size),
                        "at_peak": int(item.size if item.at_peak is None else item.at_peak),
                    }
                    for item in phase.items
                ],
            }
            for phase in option.estimate.phases
        ],
        "disk": [{"role": item.role, "kind": item.kind, "bytes": int(item.size)} for item in option.estimate.disk],
    }


def _number(seconds: float) -> float | None:
    """JSON knows no infinity."""
    return None if math.isinf(seconds) else seconds
