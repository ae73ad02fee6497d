"""A moving average of trained parameters in float32: what samples are drawn with and what is exported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.distributed.pieces import local
from wandistiller.memory.stored_state import changing_state


class MovingAverage:
    """``average = decay * average + (1 - decay) * parameter`` after every step.

    Early on the decay is smaller, ``(1 + step) / (10 + step)``, so that the random start is soon forgotten. Weights are read
    and written through the model's state, which knows where they are, on the device or streamed. An optimiser that has new
    weights at hand in a thread's cache may take them in itself (``leave_to``).
    """

    def __init__(self, model: nn.Module, names: Collection[str], decay: float, device: torch.device | None = None) -> None:
        """Start from the named weights; ``device`` keeps the average elsewhere, such as in host memory."""
        self._model = model
        self.decay = decay
        state = changing_state(model)
        self.averages = {name: state[name].detach().to(device, torch.float32, copy=True) for name in names}
        self._wait: Callable[[], None] | None = None

    def leave_to(self, wait: Callable[[], None]) -> None:
        """Leave every step to somebody else, who has finished one when ``wait`` returns."""
        self._wait = wait

    def weight(self, step: int) -> float:
        """Return how much a step's weights count; the first step is 1."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by name, complete."""
        if self._wait is not None:
            self._wait()
        return dict(self.averages)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the weights as they are now."""
        state = changing_state(self._model)
        for name, average in self.averages.items():
            local(average).copy_(local(state[name]))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step."""
        if self._wait is not None:
            return
        weight = self.weight(step)
        state = changing_state(self._model)
        together: list[tuple[Tensor, Tensor]] = []
        for name, average in self.averages.items():
            mine, other = local(average), local(state[name])  # of what is spread over ranks, each averages its piece
            if other.dtype == mine.dtype and other.device == mine.device:
                together.append((mine, other))
            else:
                mine.lerp_(other.to(mine.device, mine.dtype), weight)
        if together:
            torch._foreach_lerp_(*map(list, zip(*together, strict=True)), weight)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the model have the averages for as long as the block runs."""
        state = changing_state(self._model)
        own = {name: state[name].detach().clone() for name in self.averages}
        try:
            self._model.load_state_dict(self.tensors(), strict=False)
            yield
        finally:
            self._model.load_state_dict(own, strict=False)


def in_use(average: MovingAverage | None) -> AbstractContextManager[Any]:
    """Let a model have its average for as long, where there is one."""
    return average.in_use() if average is not None else nullcontext()
