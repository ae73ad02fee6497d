"""What a loop tells whoever listens. A whole optional feature (samples, metrics, an average) is one callback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from wandistiller.distributed.ranks import read_ranks
from wandistiller.terminal import say
from wandistiller.train.ema import MovingAverage
from wandistiller.train.interrupts import Interrupted
from wandistiller.train.random_states import keep_random_states

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop


class Callback:
    """Does nothing at any event; a feature overrides those that it needs."""

    def started(self, loop: Loop) -> None:
        """Before the first step of this process."""

    def stepping(self, loop: Loop) -> None:
        """Before every step."""

    def stepped(self, loop: Loop) -> None:
        """After every step, before its state is saved: what belongs to the step, such as an average, and takes no time."""

    def looking(self, loop: Loop) -> None:
        """After every step, once a state that is due is saved: what takes its time and changes nothing that is saved.

        It may call ``loop.heed_signals``. Random numbers have to be left as they are: a run that goes on from the state has not
        drawn them.
        """

    def logged(self, loop: Loop, values: Mapping[str, float]) -> None:
        """After every logging interval, with its averages."""

    def saved(self, loop: Loop, path: str) -> None:
        """After a state was written, on rank 0."""

    def ended(self, loop: Loop) -> None:
        """After the last step."""

    def state(self) -> dict[str, Tensor]:
        """Return what has to be saved with the run."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what was saved."""


class EverySoOften(Callback, ABC):
    """Does something after every ``every`` steps, and at the end if that step was not one of them; 0 is the end alone.

    A run that is interrupted has not come to its end: whoever stopped it wants it to be over. What a signal comes to is left
    out, where ``act`` calls ``loop.heed_signals`` often enough.
    """

    what = "a look at the model"
    """What is said to be left out."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._done_at = -1

    def looking(self, loop: Loop) -> None:
        if self._every and loop.step % self._every == 0:
            self._do(loop)

    def ended(self, loop: Loop) -> None:
        if self._done_at != loop.step and loop.step >= loop.options.num_steps:
            self._do(loop)

    @abstractmethod
    def act(self, loop: Loop) -> None:
        """Do it, on all ranks, which call ``loop.heed_signals`` together."""

    def _do(self, loop: Loop) -> None:
        self._done_at = loop.step
        with loop.clock.pause(), keep_random_states(loop.device):
            try:
                loop.heed_signals()
                self.act(loop)
            except Interrupted:
                if loop.ranks.is_first:
                    say(f"Step {loop.step}: left out {self.what}, because a signal came")


class KeepAverage(Callback):
    """Keeps a moving average of a trained role."""

    def __init__(self, average: MovingAverage) -> None:
        self.average = average

    def stepped(self, loop: Loop) -> None:
        self.average.update(loop.step)

    def state(self) -> dict[str, Tensor]:
        return self.average.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            self.average.restart()
            if read_ranks().is_first:
                say("The state is of a run without --use-ema: the moving average begins with the weights of the state")
            return
        for name, average in self.average.averages.items():
            average.copy_(tensors[name])
