"""A loop's states on their way to the disk: ranks write together, and beside the steps that follow where there is room."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist

from wandistiller.checkpoint.training_state import Saving, TrainingState, TrainingStates
from wandistiller.distributed.ranks import Ranks


class Saves:
    """Writes one state at a time, for as long as a loop runs."""

    def __init__(self, states: TrainingStates, ranks: Ranks) -> None:
        self.states = states
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = None
        self._saving: Saving | None = None

    def __enter__(self) -> None:
        # A group of its own: what is written beside the steps must not get in between their exchanges.
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Not waiting for a state after a failure: a rank that is gone would never finish it.
        self._group = None

    def save(self, state: TrainingState, *, beside: bool) -> None:
        """Write a state; ``beside`` copies it to host memory first, if that has the room, and goes on while it is written."""
        # Ranks may see different amounts of room, and have to do the same.
        if beside and not self._ranks.largest(int(not state.fits_twice)):
            self._saving = self.states.start_saving(state, self._group)
        else:
            self._saving = Saving(self.states.save(state, self._group))

    def finish(self) -> str | None:
        """Return where the state is that was written last, once it is complete; None if that was said before."""
        if self._saving is None:
            return None
        path, self._saving = str(self._saving.wait()), None
        return path
