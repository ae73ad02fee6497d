"""What one step does to a device's memory, and the work in it: written down for a few blocks, played back for many.

A model of Wan's kind is the same block many times over, so seven blocks tell of forty: one in the middle stands for all
there, forward and backward. Played back, every tensor of every block is told to a model of the allocator in its order, so
the answer is the one that the whole model would have given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

Place = tuple[str, int]
"""A part of a step: its name, and which block it belongs to; -1 for what happens once."""
Key = tuple[Place, int]
"""A tensor: where it was made, and its number there."""

Translate = Callable[[Key], list[Key]]
"""From a tensor on the tape to those that it stands for."""

NUM_BLOCKS = 7
"""Blocks to write down: four at the beginning and two at the end, which are special or deal with one that is, and one that is
like all others."""
_MIDDLE = {False: 4, True: 2}
"""The one that stands for those in the middle, in forward and in backward, where the last block comes first. What is sent to
the host is gone three blocks later, so the fourth still deals with the first."""
_NEAR = 3
"""How far apart blocks have to do with each other as neighbours; further away they mean a certain one."""
BACKWARD = "backward of "
UPDATE = "update of "
GIVEN = "given to "
"""What each block is compared with."""
COMPARED = "comparison of "
"""With that; played in the order of blocks, though it is done from the last on: one shares nothing with another."""


@dataclass(frozen=True)
class Kernel:
    """One piece of work on the device."""

    kind: str
    """matmul, convolution, convolution backward, attention, other; or to_host, to_device for a copy over the bus."""
    flops: float
    num_bytes: int
    """Read and written."""
    dtype: str = ""


@dataclass
class Part:
    """A part of a step: what is taken and given back, in order, and the work."""

    place: Place
    events: list[tuple[Key, int]] = field(default_factory=list)
    """A tensor and its bytes; -1 for its end."""
    work: Counter[Kernel] = field(default_factory=Counter)
    num_by_autograd: int = 0
    """Kernels that no Python asked for: of backward, without what it computes again."""
    num_made: int = 0
    result: Key | None = None
    """What a block gave."""

    @property
    def is_backward_of_block(self) -> bool:
        name, block = self.place
        return block >= 0 and name.startswith(BACKWARD) and COMPARED not in name

    def make(self, num_bytes: int) -> Key:
        """Write down a new tensor."""
        key = (self.place, self.num_made)
        self.num_made += 1
        self.events.append((key, num_bytes))
        return key


@dataclass
class Tape:
    """The parts of a step in their order."""

    parts: list[Part] = field(default_factory=list)
    gradients: frozenset[Key] = frozenset()
    """Those of blocks' weights."""

    def begin(self, place: Place) -> Part:
        """Start another part."""
        self.parts.append(Part(place))
        return self.parts[-1]

    def end(self, key: Key) -> None:
        """Write down that a tensor is gone."""
        self.parts[-1].events.append((key, -1))

    def played(self, num_blocks: Mapping[str, int]) -> Iterator[tuple[Part, Translate]]:
        """Yield the parts of a step of models with so many blocks, each with a translation of its tensors' keys.

        ``num_blocks`` has the models that were written down with ``NUM_BLOCKS`` blocks, by the name of their parts.
        """
        for part in self.parts:
            name, block = part.place
            model = _model(name)
            if model not in num_blocks or block < 0:
                yield part, _translation(0, part.place, num_blocks)
                continue
            extra = num_blocks[model] - NUM_BLOCKS
            middle = _MIDDLE[name.startswith(BACKWARD)]
            if block == middle:
                shifts = range(extra, -1, -1) if name.startswith(BACKWARD) else range(extra + 1)
            else:
                shifts = range(extra, extra + 1) if block > middle else range(1)
            for shift in shifts:
                yield part, _translation(shift, part.place, num_blocks)

    def with_leaving_gradients(self, model: str) -> Tape:
        """Return the tape of a step in which the gradients of a model's blocks leave the device.

        A block's are gone when the next block's are complete, by when they have been copied to the host, and the last ones at
        the end.
        """
        name = BACKWARD + model
        parts = []
        leaving: list[Key] = []
        for part in self.parts:
            events = list(part.events)
            own = [index for index, (key, num_bytes) in enumerate(events) if num_bytes >= 0 and key in self.gradients]
            if part.place[0] == name and own:
                complete = own[-1] + 1
                events[complete:complete] = [(key, -1) for key in leaving]
                leaving = [part.events[index][0] for index in own]
            parts.append(replace(part, events=events))
        parts[-1].events.extend((key, -1) for key in leaving)
        return Tape(parts, self.gradients)

    def with_added_gradients(self, *, by_block: bool = False) -> Tape:
        """Return the tape of a step whose gradients are added to others as soon as they are made.

        ``by_block`` says that a block's are given all at once, as those of what is computed again are.
        """
        before_updates = [part for part in self.parts if not part.place[0].startswith(UPDATE)]
        ended = {key for part in before_updates for key, num_bytes in part.events if num_bytes < 0}
        parts, added = [], set[Key]()
        for part in self.parts:
            is_backward = part.place[0].startswith(BACKWARD)
            events, waiting = list[tuple[Key, int]](), list[Key]()
            count = sum(key in self.gradients and key not in ended for key, _ in part.events) if by_block else 0
            for key, num_bytes in part.events:
                if key in added:
                    continue
                events.append((key, num_bytes))
                if is_backward and num_bytes >= 0 and key not in ended:
                    added.add(key)
                    waiting.append(key)
                    count -= key in self.gradients
                    if count <= 0:
                        events += [(key, -1) for key in waiting]
                        waiting.clear()
            parts.append(replace(part, events=events))
        return Tape(parts, self.gradients)

    def work(self, num_blocks: Mapping[str, int]) -> Counter[Kernel]:
        """Return all work of such a step."""
        total: Counter[Kernel] = Counter()
        for part, _ in self.played(num_blocks):
            total.update(part.work)
        return total


def _model(name: str) -> str:
    """Return whose blocks parts of this name belong to."""
    for prefix in (BACKWARD, GIVEN, COMPARED):
        name = name.removeprefix(prefix)
    return name


def _translation(shift: int, place: Place, num_blocks: Mapping[str, int]) -> Translate:
    """Return how a part that is played ``shift`` blocks later names its tensors and others'."""
    model, current = _model(place[0]), place[1]

    def translate(key: Key) -> list[Key]:
        (name, block), number = key
        owner = _model(name)
        if block < 0 or owner not in num_blocks:
            return [key]
        if owner == model and current >= 0 and abs(block - current) <= _NEAR:
            return [((name, block + shift), number)]
        # Named far away, or where no block is: what the one in the middle stands for is meant too.
        extra, middle = num_blocks[owner] - NUM_BLOCKS, _MIDDLE[name.startswith(BACKWARD)]
        shifts = range(extra + 1) if block == middle else (extra,) if block > middle else (0,)
        return [((name, block + each), number) for each in shifts]

    return translate
