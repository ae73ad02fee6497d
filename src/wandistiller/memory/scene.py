"""A device's memory played through: who holds what, what each step does to it, and the most that it ever takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from wandistiller.memory.allocator_model import AllocatorModel, expandable_segments
from wandistiller.memory.tape import BACKWARD, GIVEN, UPDATE, Key, Tape
from wandistiller.units import Bytes

_NEVER = 2**62
Made = tuple[int, Key]
"""A tensor: the number of the step that made it, and its name there."""
FEATURES = "matched features"
"""What a step's blocks are compared with."""


@dataclass
class _Life:
    """A tensor of a step: its size, and the moments when it was made and when it was gone."""

    num_bytes: int
    begin: int
    end: int = _NEVER
    is_used_up: bool = False
    """Whether an update was its end."""

    def is_there(self, moment: int) -> bool:
        return self.begin <= moment < self.end


@dataclass(frozen=True)
class Played:
    """What a step did."""

    peak: Bytes
    """In use at the worst moment, with all that is held."""
    kept: Bytes
    """Made by the step and alive when its backward began."""
    left: dict[Made, int]
    """Made by the step and still there at its end: gradients."""
    gradients: Bytes
    """These, and those that updates on the way have used up."""
    at_peak: dict[str, Bytes]
    """What the step had made, or was given, that was there at the worst moment, by kind."""
    results: Sequence[Made] = ()
    """What was kept of blocks' results, in their order, for another step."""


class Scene:
    """Holds things by label and plays steps, on a model of the allocator."""

    def __init__(self) -> None:
        self._allocator = AllocatorModel(is_expandable=expandable_segments())
        self._held: dict[tuple[str, str], list[int]] = {}
        self._num_keys = self._num_plays = 0

    @property
    def reserved(self) -> Bytes:
        """The most that the process has held of the device so far."""
        return Bytes(self._allocator.peak_reserved)

    @property
    def allocated(self) -> Bytes:
        """What is in use now."""
        return Bytes(self._allocator.allocated)

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

    def play(
        self,
        tape: Tape,
        num_blocks: Mapping[str, int],
        *,
        keeps: Collection[int] = (),
        given: Sequence[Made] = (),
        staying: Collection[int] = (),
    ) -> Played:
        """Do what a step does; what it leaves is still there afterwards, until ``drop``.

        ``keeps`` are blocks whose results another step is given; ``given`` is what one before has kept for this one, which lets
        it go. ``staying`` are blocks whose gradients stay where others' leave.
        """
        allocator, lives = self._allocator, dict[Made, _Life]()
        self._num_plays += 1
        before = allocator.allocated - self.size(dict.fromkeys(given))
        peak = allocator.peak_allocated = allocator.allocated
        aliases, results = dict[Made, Made](), dict[Made, None]()
        kept, backward = 0, _NEVER
        moment = worst = 0
        for part, name_of in tape.played(num_blocks):
            if backward == _NEVER and part.place[0].startswith(BACKWARD):
                kept, backward = allocator.allocated - before, moment
            if part.result is not None:
                found = [name for name in name_of(part.result) if name[0][1] in keeps]
                results |= dict.fromkeys((self._num_plays, name) for name in found)
            for own_key, num_bytes in part.events:
                for name in name_of(own_key):
                    key = (self._num_plays, name)  # what an earlier step has left is called the same
                    moment += 1
                    if num_bytes >= 0:
                        assert key not in lives, f"{key} is made twice"
                        lives[key] = _Life(num_bytes, moment)
                        if given and part.place[0].startswith(GIVEN):
                            aliases[key] = given[name[0][1]]
                            continue
                        allocator.allocate(key, num_bytes)
                        if allocator.peak_allocated > peak:
                            peak, worst = allocator.peak_allocated, moment
                    elif key not in results and not (own_key in tape.gradients and name[0][1] in staying):
                        lives[key].end, lives[key].is_used_up = moment, part.place[0].startswith(UPDATE)
                        allocator.free(aliases.get(key, key))
        left = {key: life.num_bytes for key, life in lives.items() if life.end == _NEVER and key not in results}
        gradients = sum(left.values()) + sum(life.num_bytes for life in lives.values() if life.is_used_up)
        compared = {*results, *aliases}
        kinds = _kinds(lives, worst, backward, peak - before, compared)
        return Played(Bytes(peak), Bytes(kept), left, Bytes(gradients), kinds, tuple(results))

    def exchange(self, played: Played, role: str, kind: str, sizes: Iterable[int]) -> Played:
        """Hold tensors that take the place, one by one, of what a step left and is half as large: its gradients in 16 bits."""
        left = dict(played.left)
        of_size: dict[int, list[Made]] = {}
        for key, num_bytes in left.items():
            of_size.setdefault(num_bytes, []).append(key)
        for size in sizes:
            self.hold(role, kind, [size])
            if keys := of_size.get(size // 2):
                self._allocator.free(keys[-1])
                del left[keys.pop()]
        return replace(played, left=left)

    def size(self, tensors: Iterable[Made]) -> Bytes:
        """Return what tensors of earlier steps take."""
        return Bytes(sum(self._allocator.size(key) for key in tensors))

    def drop(self, played: Played) -> None:
        """Let go of what a step left."""
        for key in played.left:
            self._allocator.free(key)


def _kinds(lives: Mapping[Made, _Life], moment: int, backward: int, total: int, compared: Collection[Made]) -> dict[str, Bytes]:
    """Sort what was there at a moment: gradients stay until an update, what is kept was there before, the rest passes."""
    gradients = kept = features = 0
    for key, life in lives.items():
        if not life.is_there(moment):
            continue
        if key in compared:
            features += life.num_bytes
        else:
            is_left = (life.end == _NEVER or life.is_used_up) and backward != _NEVER
            gradients += life.num_bytes if is_left else 0
            kept += life.num_bytes if not is_left and backward != _NEVER and life.is_there(backward) else 0
    rest = total - gradients - kept - features
    sizes = {"gradients": gradients, "kept activations": kept, FEATURES: features, "working memory": rest}
    return {kind: Bytes(size) for kind, size in sizes.items()}
