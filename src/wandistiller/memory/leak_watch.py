"""A watch for memory that grows step by step: a trend, told apart from warm-up, from noise and from buckets of another size.

What is looked at is memory *after* a step, when all that a step needs is gone. Each bucket of shapes has its own level, taken
from its first observation, and only what rises above that counts; where hardly a bucket is seen twice, memory itself does. The
steps are cut into windows; if the least of each window rises from one to the next more often than chance allows, that is a
leak, and its size a step is the slope through them. Looked at are all steps, and the last half, quarter and
eighth of them: a leak may begin late.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from wandistiller.units import Bytes

NUM_WINDOWS = 8
# Of the 28 pairs of windows, how many more must rise than fall, in all steps and in some of them. By chance that happens to 1
# in 5,000 (Mann-Kendall) and to 1 in 40,000: the question is asked again and again.
SIGNIFICANT_RISES = {1: 26, 2: 28, 4: 28, 8: 28}


@dataclass(frozen=True)
class Leak:
    """Memory of one kind that grows."""

    kind: str
    bytes_per_step: float
    since_step: int
    until_step: int

    @property
    def total(self) -> Bytes:
        return Bytes(round(self.bytes_per_step * (self.until_step - self.since_step)))

    def __str__(self) -> str:
        each = Bytes(round(self.bytes_per_step))
        return f"{self.kind} memory grows by {each} a step: {self.total} from step {self.since_step} to {self.until_step}"


@dataclass
class LeakWatch:
    """Collects observations and says what grows."""

    warmup_steps: int = 500
    """Steps whose memory is not looked at: caches fill, kernels are chosen, every bucket is seen once."""
    tolerance: Bytes = field(default_factory=lambda: Bytes(2**20))
    """Growth over all observations that is not worth a word."""
    tolerances: Mapping[str, Bytes] = field(default_factory=lambda: {"host": Bytes(4 * 2**20)})
    """The same for kinds of which small amounts come and go: the host's allocator keeps what it was given."""
    max_observations: int = 4096
    """Most that are remembered of each kind, beyond that every second one is forgotten; and most buckets."""

    def __post_init__(self) -> None:
        self._levels: dict[tuple[str, Hashable], int] = {}
        self._excess: dict[str, list[tuple[int, int]]] = {}
        """Bytes above the bucket's level, of buckets that were seen before."""
        self._memory: dict[str, list[tuple[int, int]]] = {}
        self._stride: dict[str, int] = {}

    def observe(self, step: int, kind: str, num_bytes: int, bucket: Hashable = None) -> None:
        """Note how much memory of a kind is in use after a step on inputs of a bucket."""
        if step < self.warmup_steps:
            return
        excess, memory = self._excess.setdefault(kind, []), self._memory.setdefault(kind, [])
        level = self._levels.get((kind, bucket))
        if level is None and len(self._levels) < self.max_observations:
            # A bucket that is seen for the first time has its level where the others are now, not where they began.
            drift = min((above for _, above in excess[-NUM_WINDOWS:]), default=0)
            self._levels[kind, bucket] = num_bytes - drift
        if step % self._stride.setdefault(kind, 1) == 0:
            memory.append((step, num_bytes))
            excess += [(step, num_bytes - level)] if level is not None else []
        if len(memory) > self.max_observations:
            del memory[1::2], excess[1::2]
            self._stride[kind] *= 2

    def leaks(self) -> list[Leak]:
        """Return what has grown so far."""
        found = map(self._leak, self._memory)
        return [leak for leak in found if leak is not None]

    def _leak(self, kind: str) -> Leak | None:
        excess, memory = self._excess[kind], self._memory[kind]
        points = excess if 2 * len(excess) > len(memory) else memory
        trends = (
            self._trend(kind, points[len(points) - len(points) // part :], enough) for part, enough in SIGNIFICANT_RISES.items()
        )
        return next((leak for leak in trends if leak is not None), None)

    def _trend(self, kind: str, points: list[tuple[int, int]], enough: int) -> Leak | None:
        if len(points) < 4 * NUM_WINDOWS:
            return None
        size = len(points) / NUM_WINDOWS
        windows = [points[round(index * size) : round((index + 1) * size)] for index in range(NUM_WINDOWS)]
        lows = [(statistics.median(step for step, _ in window), min(excess for _, excess in window)) for window in windows]
        pairs = list(itertools.combinations(lows, 2))
        rises = sum((later > earlier) - (later < earlier) for (_, earlier), (_, later) in pairs)
        slope = statistics.median((later - earlier) / (end - start) for (start, earlier), (end, later) in pairs)
        leak = Leak(kind, slope, points[0][0], points[-1][0])
        tolerance = self.tolerances.get(kind, self.tolerance)
        if rises < enough or min(lows[-1][1] - lows[0][1], leak.total) <= tolerance:
            return None
        return leak
