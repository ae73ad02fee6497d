"""The place in the data as a state holds it, and what a run with other batches or other data makes of it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wandistiller.data.batches import BatchPlan
from wandistiller.data.loader import SampleReader
from wandistiller.errors import UsageError

_NUM_NAMES = 1000
"""Names that tell data apart; reading millions would hold up a start."""


@dataclass(frozen=True)
class FoundPlace:
    """Where to go on, and what to tell the user of it."""

    position: int
    note: str = ""


class DataPlaces:
    """Turns positions of a plan into places that another plan finds again, and back."""

    def __init__(self, plan: BatchPlan, reader: SampleReader) -> None:
        self._plan = plan
        self._reader = reader

    def describe(self, position: int) -> dict[str, Any]:
        """Return a place in the data as plain values, with what it depends on."""
        plan = self._plan
        epoch, samples_done = plan.place(position)
        return {
            "batch_size": plan.batch_size,
            "batches_per_epoch": plan.batches_per_epoch,
            "num_samples": plan.num_samples,
            "names": self._names,
            "seed": plan.seed,
            "epoch": epoch,
            "samples_done": samples_done,
        }

    def find(self, place: Mapping[str, Any], position: int) -> FoundPlace:
        """Return where a place is that had ``position`` in its own plan; raise ``UsageError`` where the data are others."""
        self._refuse_others(place)
        plan, epoch, wanted = self._plan, place["epoch"], place["samples_done"]
        if (place["batch_size"], place["batches_per_epoch"]) == (plan.batch_size, plan.batches_per_epoch):
            return FoundPlace(position)
        found = plan.position_at(epoch, wanted)
        _, done = plan.place(found)
        changed = "The sizes of samples are others than before"
        if place["batch_size"] != plan.batch_size:
            changed = f"--batch-size was {place['batch_size']} and is {plan.batch_size}"
        again = f"; {wanted - done} come again, because batches are cut otherwise" if wanted > done else ""
        return FoundPlace(found, f"{changed}: going on in epoch {epoch + 1} after {done} of {plan.num_samples} samples{again}")

    def _refuse_others(self, place: Mapping[str, Any]) -> None:
        plan, differences = self._plan, []
        if place["num_samples"] != plan.num_samples:
            differences.append(f"it had {place['num_samples']} samples, and now there are {plan.num_samples}")
        elif place["names"] != self._names:
            differences.append(f"its {plan.num_samples} samples had other names")
        if place["seed"] != plan.seed:
            differences.append(f"it had --seed {place['seed']}, and this run has --seed {plan.seed}")
        if differences:
            raise UsageError(
                "The state is of a training on other data, or in another order.",
                why=f"{', and '.join(differences)}: its place in the data means nothing here.",
                fix="Resume with the data and the --seed that it was started with, or begin a new run from its result.",
            )

    @functools.cached_property
    def _names(self) -> str:
        """A hash of samples' names, evenly over all of them."""
        count = len(self._reader)
        some = range(0, count, max(count // _NUM_NAMES, 1))
        return hashlib.sha256("\n".join(self._reader.name(index) for index in some).encode()).hexdigest()[:16]
