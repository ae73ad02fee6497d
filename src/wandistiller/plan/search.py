"""The search: ways are tried from the fastest on, and those that cannot be better than what fits are left out, and counted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wandistiller.memory.estimates import HOST_SHARE, Estimate, Item, Phase, fits, fits_host, margin
from wandistiller.memory.hardware import Hardware
from wandistiller.plan.bounds import Least
from wandistiller.plan.candidates import Changes, Way
from wandistiller.plan.residents import resident_blocks
from wandistiller.units import Bytes

_ENOUGH_POLICIES = 2
"""Policies of which something has to fit before the others are left out."""
_CHEAP_POLICIES = 2
"""Policies for which smaller batches are tried whether or not something else fits: the others take longer than these."""


@dataclass(frozen=True)
class Option:
    """A way that was tried."""

    way: Way
    estimate: Estimate
    lacks: tuple[str, ...]
    """Why it does not fit; nothing if it does."""

    @property
    def changes(self) -> Changes:
        return self.way.changes

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


@dataclass(frozen=True)
class Untried:
    """A way that was left out."""

    way: Way
    why: str


@dataclass
class Search:
    """Tries the ways of a job on a machine."""

    predict: Callable[[Changes], Estimate]
    least_on_card: Callable[[Changes], Least]
    hardware: Hardware
    resident_field: str | None = None
    """The field that says how many blocks stay on the card, where it is open."""
    fixed_phases: tuple[str, ...] = ()
    """Phases that are the same in every way."""
    is_in_order: bool = True
    """Whether what recomputes less is faster where both fit."""

    def __post_init__(self) -> None:
        self.found: list[Option] = []
        self.untried: list[Untried] = []
        self._working: dict[Hashable, dict[int, int]] = {}
        """What was beside what was held, by halvings of the batch."""
        self._kept_on_host: dict[Hashable, int] = {}

    def run(self, ways: Sequence[Way]) -> None:
        """Try all that can be the best; the first is worked out in any case."""
        later = []
        for way in ways:
            reason = self._hopeless() or self._reason_against(way)
            if reason == _LATER:
                later.append(way)
            elif reason:
                self.untried.append(Untried(way, reason))
            else:
                self.found += self._tried(way)
        for way in later:
            if any(each.fits and each.way.tier <= way.tier and _can_judge(each, way) for each in self.found):
                self.untried.append(Untried(way, "slower than what fits"))
            else:
                self.found += self._tried(way)

    def _hopeless(self) -> str:
        """Name a phase that is the same in every way and does not fit."""
        phases = self.found[0].estimate.phases if self.found else ()
        for phase in phases:
            if phase.name in self.fixed_phases and not self._fits_card(phase.reserved):
                return f"{phase.name} alone needs {phase.reserved} and a margin of {margin(phase.reserved)}"
        return ""

    def _fits_card(self, size: int) -> bool:
        return self.hardware.card is None or fits(size, self.hardware.room)

    def _reason_against(self, way: Way) -> str:
        """Say why a way cannot be better than those that fit; nothing if it can."""
        if "cpu" in way.changes.values() and any(each.fits for each in self.found):
            return "much slower than what fits"
        # What costs accuracy has to be better than everything, what costs none than its like.
        fitting = [each for each in self.found if each.fits and _can_judge(each, way)]
        rivals = [each.way for each in fitting if each.way.is_exact or not way.is_exact]
        earlier = [each for each in rivals if each.policy < way.policy]
        alike = [each for each in rivals if each.policy == way.policy]
        is_fast_enough = any(each.tier == 0 and each.halvings == 0 for each in earlier)
        # What a slower place is chosen for may be far slower than recomputing more in a faster one.
        policies = {each.policy for each in earlier if each.tier <= way.tier}
        if self.is_in_order and (is_fast_enough or len(policies) >= _ENOUGH_POLICIES):
            return "slower than what fits"
        if way.halvings and any(each.tier <= way.tier and each.halvings < way.halvings for each in alike):
            return "slower than a larger batch, which fits"
        if any(each.tier < way.tier and each.halvings == way.halvings for each in alike):
            return "slower than what fits"
        if way.is_slim and any((each.tier, each.halvings) == (way.tier, way.halvings) for each in alike):
            return "costs accuracy and is no faster"
        if any(each.changes == _from_memory(way) and not self._fits_card(each.estimate.device) for each in self.found):
            return "no smaller on the card than what does not fit"
        return _LATER if way.halvings and (earlier or way.policy >= _CHEAP_POLICIES) else ""

    def _tried(self, way: Way) -> Iterator[Option]:
        alike = _activations(way)
        least = self.least_on_card(way.changes)
        working = self._working.setdefault(alike, {})
        total = least.total(max((_of_smaller(size, way.halvings - count) for count, size in working.items()), default=0))
        on_host = Bytes(least.on_host(self._spare(total)) + self._kept_on_host.get((alike, way.halvings), 0))
        lack = ""
        if self.found and not self._fits_card(total):
            lack = f"needs more than {total} and a margin of {margin(total)} on a card that has {self.hardware.room}"
        elif self.found and not fits_host(on_host, self.hardware):
            may_be_used = Bytes(int(HOST_SHARE * self.hardware.host_memory))
            lack = f"needs more than {on_host} of host memory, {may_be_used} may be used"
        if lack:
            items = (Item("", "weights", "host", on_host, is_shared=True),)
            phase = Phase(name="training", items=items, peak=total, reserved=total, seconds=float("inf"), is_least=True)
            yield Option(way, Estimate(phases=(phase,)), (lack,))
            return
        option = self._option(way)
        working[way.halvings] = max(least.working(option.estimate), working.get(way.halvings, 0))
        self._kept_on_host[alike, way.halvings] = option.estimate.kept_on_host()
        yield option
        if self.resident_field is not None:
            yield from self._with_residents(option, self.resident_field)

    def _spare(self, size: int) -> int:
        """Return what the cards of a machine have beside ways of a size, where blocks may stay on them."""
        if self.resident_field is None or self.hardware.card is None:
            return 0
        return max(self.hardware.room - size, 0) * max(self.hardware.num_cards, 1)

    def _with_residents(self, option: Option, field: str) -> Iterator[Option]:
        """Yield the way with as many blocks on the card as fit, or one less, if that is faster."""
        most = resident_blocks(option.estimate, self.hardware) if self._fits_card(option.estimate.device) else 0
        fitting: list[Option] = []
        # What is there already is rounded up in other ways with more beside it.
        for count in range(most, max(most - 3, 0), -1):
            more = self._option(replace(option.way, changes={**option.changes, field: str(count)}))
            fitting += [more] if more.fits else []
        # Of an odd number of blocks that visit two have to wait for each other where a pass ends.
        best = min(fitting[:2], key=lambda each: each.seconds, default=option)
        if best is not option and (best.seconds < option.seconds or not option.fits):
            yield best

    def _option(self, way: Way) -> Option:
        estimate = self.predict(way.changes)
        return Option(way, estimate, tuple(estimate.lacks(self.hardware)))


_LATER = "only if nothing else fits"


def _can_judge(option: Option, way: Way) -> bool:
    """Say whether a way that fits tells something of another one's time: not if it waits for what ranks send, unless both do.

    How much that is depends on how ranks share the student and the teacher, and on nothing that the order of ways is about.
    """
    return not option.estimate.waits or _sharing(option.way) == _sharing(way)


def _sharing(way: Way) -> tuple[Any, bool]:
    return way.changes.get("parallel"), way.changes.get("teacher_device_strategy") == "sharded"


def _from_memory(way: Way) -> Changes | None:
    """Return the way that streams from host memory what this one streams from disk: it holds the same on the card."""
    for name in ("placement", "teacher_device_strategy"):
        if way.changes.get(name) == "disk":
            return {**way.changes, name: "offload"}
    return None


def _activations(way: Way) -> Hashable:
    """Return what ways have in common that compute the same in the same precision, with a teacher that is held alike, on
    batches of any size."""
    names = ("weights_dtype", "parallel", "placement")
    teacher = way.changes.get("teacher_device_strategy")
    # Slices of a teacher are no part of what is held at least, and the CPU's teacher computes nothing on the card.
    how = teacher if teacher in ("cpu", "sharded", None) else "on the card"
    return (way.policy, how, *(way.changes.get(name) for name in names))


def _of_smaller(size: int, halvings: int) -> int:
    """Return what remains at least of what a batch takes where it is halved: all that grows with it halves."""
    return int(size / 2**halvings) if halvings >= 0 else 0
