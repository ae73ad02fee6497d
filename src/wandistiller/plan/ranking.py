"""What fits in its order, why the rest does not, and what was not tried, in words."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rich.markup import escape
from rich.table import Table

from wandistiller.config.command import flag_words
from wandistiller.config.sample import SampleConfig
from wandistiller.memory.estimates import HOST_SHARE
from wandistiller.plan.candidates import Changes
from wandistiller.plan.planner import Plan
from wandistiller.plan.search import Option

_POLICY_FIELDS = ("activation_policy", "activations_to_host", "vae_gradient_checkpointing", "vae_tiling")
_PLACE_FIELDS = ("placement", "teacher_device_strategy", "parallel")
_BATCH_FIELDS = ("batch_size", "gradient_accumulation")


def ranking(plan: Plan, top: int) -> Table:
    """Return a table of the best, of what else fits, and of what fits and is faster at a cost in accuracy."""
    table = Table(title="What fits: the best, then others from the fastest on", title_justify="left")
    has_card = plan.hardware.card is not None
    time = "once loaded" if any(each.estimate.is_once for each in plan.ranked) else "step"
    for name in (time, *(("card", "host") if has_card else ("memory",)), "flags", "costs in accuracy"):
        table.add_column(name, justify="left" if name in ("flags", "costs in accuracy") else "right", overflow="fold")
    for each in plan.ranked[:top]:
        found = each.estimate
        cells = [seconds_text(each.seconds), *map(str, (found.device, found.host) if has_card else (found.memory,))]
        style = "bold" if each is plan.best else None
        table.add_row(*cells, escape(flags(each)) or "as asked for", ", ".join(each.way.costs), style=style)
    return table


def reasons(plan: Plan) -> list[str]:
    """Say why the best is the best, and why each of the others is not, by groups that are alike."""
    found = [*_about_accuracy(plan)]
    if not plan.asked.fits:
        found.append(f"As asked for it {'; '.join(plan.asked.lacks)}.")
    found += _losers(plan)
    found += _untried(plan)
    if plan.best is None:
        more = "more memory" if plan.hardware.card is None else "a card with more memory, or more host memory"
        fewer = ", or start fewer processes on a machine" if plan.hardware.num_cards > 1 else ""
        found.append(f"Nothing fits. Take a smaller model, picture or clip, or {more}{fewer}.")
        found += _about_text(plan)
    return found


def flags(option: Option) -> str:
    """Return what a way adds to the command."""
    return " ".join(flag_words(option.changes))


def _about_accuracy(plan: Plan) -> list[str]:
    best = plan.best
    if best is None:
        return []
    if not best.way.is_exact:
        is_alone = not any(each.way.is_exact for each in plan.fitting)
        why = "Nothing fits without a cost in accuracy" if is_alone else "What costs none takes ten times as long"
        return [f"{why}; the best has {', '.join(best.way.costs)}."]
    if plan.faster_ones:
        fastest = min(plan.faster_ones, key=lambda each: each.seconds)
        costs = ", ".join(fastest.way.costs)
        return [
            f"{seconds_text(fastest.seconds)} with {flags(fastest)}, which is not chosen for its cost in accuracy: {costs}."
        ]
    return []


def _losers(plan: Plan) -> list[str]:
    """Return a line for each policy and place of which nothing, or not all, fits; one for those with the same reason."""
    groups: dict[str, list[Option]] = {}
    for each in plan.losers:
        groups.setdefault(_group(plan.request.job, each.changes), []).append(each)
    alike, lines = dict[str, list[str]](), list[str]()

    def size(each: Option) -> float:
        """Return how many times what there is a way takes, of what it lacks most."""
        found, hardware = each.estimate, plan.hardware
        on_host = found.host if hardware.card is not None else found.memory
        return max(found.device / hardware.room, on_host / (HOST_SHARE * hardware.host_memory))

    for name, options in groups.items():
        nearest = min(options, key=size)
        count = f" ({len(options)} ways)" if len(options) > 1 else ""
        told = (name if count and name else flags(nearest)) or name or "as asked for"
        alike.setdefault("; ".join(nearest.lacks), []).append(f"{told}{count}")
    if any(len(options) > 1 for options in groups.values()):
        lines.append("What does not fit; of several ways, by the smallest of them:")
    return lines + [f"{', or '.join(told)}: {why}" for why, told in alike.items()]


def _about_text(plan: Plan) -> list[str]:
    """Say what would fit if the text were encoded elsewhere, or that nothing will where it is not."""
    is_drawn = isinstance(plan.request.job, SampleConfig)
    how = "give its embeddings with --cond and --uncond" if is_drawn else "bring its cache along (wandistiller encode)"
    large = [(each, each.estimate.too_large(plan.hardware)) for each in (plan.asked, *plan.losers)]
    for each, found in large:
        if found == {"encoding text"}:
            which = f"With {flags(each)} the" if each.changes else "The"
            return [f"{which} text encoder alone is too large: encode the text on another machine, and {how}."]
    if all("encoding text" in found for _, found in large):
        return [f"However small the model, its text encoder is too large: encode the text on another machine, and {how}."]
    return []


def _untried(plan: Plan) -> list[str]:
    counts = Counter(each.why for each in plan.untried)
    told = [f"{count} {'ways' if count > 1 else 'way'}, {why}" for why, count in counts.items()]
    return [f"Not tried: {'; '.join(told)}."] if told else []


def _group(job: Any, changes: Changes) -> str:
    """Return the policy and the place of a way as flags, and its batch where it has another."""
    values = {name: changes.get(name, getattr(job, name, None)) for name in (*_POLICY_FIELDS, *_PLACE_FIELDS)}
    told = {name: value for name, value in values.items() if value not in (None, False, "auto")}
    return " ".join(flag_words({**{name: changes[name] for name in _BATCH_FIELDS if name in changes}, **told}))


def seconds_text(seconds: float) -> str:
    """Return a time in few digits; of what was not worked out, none."""
    if math.isinf(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
