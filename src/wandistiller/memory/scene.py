"""A device's memory played through: who holds what, what each step does to it, and the most that it ever takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wandistiller.memory.allocator_model import AllocatorModel
from wandistiller.memory.tape import BACKWARD, Key, Tape
from wandistiller.units import Bytes


@dataclass(frozen=True)
class Played:
    """What a step did."""

    peak: Bytes
    """In use at the worst moment, with all that is held."""
    kept: Bytes
    """Made by the step and alive when its backward began."""
    left: dict[Key, int]
    """Made by the step and still there at its end: gradients."""


class Scene:
    """Holds things by label and plays steps, on a model of the allocator."""

    def __init__(self) -> None:
        self._allocator = AllocatorModel()
        self._held: dict[tuple[str, str], list[int]] = {}
        self._num_keys = 0

    @property
    def reserved(self) -> Bytes:
        """What the process has taken of the device so far."""
        return Bytes(self._allocator.reserved)

    @property
    def held(self) -> dict[tuple[str, str], Bytes]:
        """Bytes by role and kind."""
        return {label: Bytes(sum(self._allocator.size(key) for key in keys)) for label, keys in self._held.items()}

    def hold(self, role: str, kind: str, sizes: Iterable[int]) -> None:
        """Take memory until it is let go."""
        for size in sizes:
            self._num_keys += 1
            self._allocator.allocate(self._num_keys, size)
            self._held.setdefault((role, kind), []).append(self._num_keys)

    def let_go(self, role: str, kind: str) -> None:
        """Give memory back to the allocator."""
        for key in self._held.pop((role, kind), []):
            self._allocator.free(key)

    def play(self, tape: Tape, num_blocks: Mapping[str, int]) -> Played:
        """Do what a step does; what it leaves is still there afterwards, until ``drop``."""
        allocator, alive = self._allocator, dict[Key, int]()
        allocator.peak_allocated = allocator.allocated
        kept: int | None = None
        before = allocator.allocated
        for part, name_of in tape.played(num_blocks):
            if kept is None and part.place[0].startswith(BACKWARD):
                kept = allocator.allocated - before
            for own_key, num_bytes in part.events:
                for key in name_of(own_key):
                    if num_bytes >= 0:
                        assert key not in alive, f"{key} is made twice"
                        alive[key] = num_bytes
                        allocator.allocate(key, num_bytes)
                    else:
                        del alive[key]
                        allocator.free(key)
        return Played(Bytes(allocator.peak_allocated), Bytes(kept or 0), alive)

    def drop(self, played: Played) -> None:
        """Let go of what a step left."""
        for key in played.left:
            self._allocator.free(key)
