"""PyTorch's optimisers on streamed weights: during a step, parameters and gradients are in host memory."""

from __future__ import annotations

import functools
import sys
import weakref
from types import FrameType
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from wandistiller.errors import UsageError


class Stepped(Protocol):
    """A model whose weights an optimiser may change."""

    stepping: Optimizer | None
    """The one in whose step the weights are on the host."""

    def has_any(self, parameters: set[int]) -> bool:
        """Say whether one of these parameters, by their identities, is streamed."""
        ...

    def move_to_host(self) -> None:
        """Let parameters and gradients be in host memory."""
        ...

    def move_to_slots(self) -> None:
        """Let parameters be on the device again, without gradients."""
        ...


_stepped: weakref.WeakSet[Stepped] = weakref.WeakSet()


def let_optimisers_step(model: Stepped) -> None:
    """Let PyTorch's optimisers update stored weights.

    PyTorch's hooks are one pair for the process and stay: taking one off when a model is collected could happen in the middle
    of an optimiser's walk through them.
    """
    _stepped.add(model)
    _install_hooks()


def forget(model: Stepped) -> None:
    """Let steps pass a model by."""
    _stepped.discard(model)


def end_failed_step(model: Stepped) -> None:
    """Bring the weights back onto the device that a step which raised has left on the host."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in ("step", "wrapper") and frame.f_locals.get("self") is model.stepping:
            raise UsageError(
                "An optimiser's step asks a streamed model for its loss.",
                why="its weights are in host memory until the step is done.",
                fix="Compute the loss before the step, or keep the model on the device.",
            )
        frame = frame.f_back
    model.move_to_slots()


@functools.cache
def _install_hooks() -> None:
    def before(optimizer: Optimizer, *_: Any) -> None:
        for model in _changed_by(optimizer):
            model.move_to_host()
            model.stepping = optimizer

    def after(optimizer: Optimizer, *_: Any) -> None:
        for model in _changed_by(optimizer):
            model.move_to_slots()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _changed_by(optimizer: Optimizer) -> list[Stepped]:
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [model for model in list(_stepped) if model.has_any(parameters)]
