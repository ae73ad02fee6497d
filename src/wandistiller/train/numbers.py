"""Losses and metrics of the steps since somebody looked: on the device until then, brought to the host in one go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wandistiller.distributed.ranks import Ranks

Sums = Mapping[str, tuple[float, int]]
"""A sum and the number of samples that it is of, by name."""


@dataclass(frozen=True)
class Number:
    """What has to be finite, and whose it is."""

    what: str
    role: str
    step: int
    names: tuple[str, ...]
    """The samples that it came from."""
    value: Tensor


class Numbers:
    """Adds metrics up, and keeps what has to be finite."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self._device = device
        self._ranks = ranks
        self._recent: list[Number] = []
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def watch(self, number: Number) -> None:
        """Let a number be looked at the next time."""
        self._recent.append(number)

    def add(self, name: str, value: Tensor, weight: int) -> None:
        """Count a metric, the mean of so many samples."""
        value = value.float() * weight
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + weight

    def means(self) -> dict[str, float]:
        """Return the metrics since the last time, averaged over samples and ranks, and begin anew."""
        # A rank that had pictures alone has no motion to tell of.
        names = sorted({name for each in self._ranks.gather(list(self._sums)) for name in each})
        nothing = torch.zeros((), device=self._device)
        sums = torch.stack([self._sums.get(name, nothing) for name in names]).cpu()
        counts = torch.tensor([float(self._counts.get(name, 0)) for name in names])
        means = self._ranks.mean(sums) / self._ranks.mean(counts)
        self._sums, self._counts = {}, {}
        return dict(zip(names, means.tolist(), strict=True))

    def sums(self) -> Sums:
        """Return what the next means are made of."""
        return {name: (float(value), self._counts[name]) for name, value in self._sums.items()}

    def load(self, everyone: Iterable[Sums]) -> None:
        """Go on with the sums that some ranks had; of all ranks together they are the same, whichever has them."""
        for sums in everyone if self._ranks.is_first else ():
            for name, (value, weight) in sums.items():
                self._sums[name] = self._sums.get(name, 0.0) + torch.tensor(value, device=self._device)
                self._counts[name] = self._counts.get(name, 0) + weight

    def not_finite(self) -> list[Number]:
        """Return the first number since the last look that is not finite, of every rank that has it; the same on all ranks."""
        if not self._recent:
            return []
        finite = torch.isfinite(torch.stack([number.value.float() for number in self._recent])).tolist()
        place = len(finite) if all(finite) else finite.index(False)
        mine = [replace(number, value=number.value.cpu()) for number in self._recent[place : place + 1]]
        self._recent = []
        everyone = self._ranks.gather((place, mine))
        # All ranks take the same turns, so what came first has the smallest place.
        first = min(place for place, _ in everyone)
        return [number for place, numbers in everyone if place == first for number in numbers]
