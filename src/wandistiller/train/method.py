"""What a training method is to the loop: roles, and turns that give losses.

A method knows its models and its mathematics and nothing of steps, accumulation, saving or ranks. Most have one turn; a
generator with a critic has two, each with its own optimiser, and one global step takes both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from wandistiller.data.loader import Batch
from wandistiller.distributed.ranks import Ranks
from wandistiller.distributed.sharding import Sharding
from wandistiller.memory.stored_state import changing_state


@dataclass(frozen=True)
class Advice:
    """What to say where a number of a role is not finite."""

    why: str = "a sample that is broken, a learning rate that is too high, or float16 that ran over."
    fix: str = "Look at these samples; resume from the last state with a lower --learning-rate or --mixed-precision bf16."


@dataclass
class Role:
    """A model with a part to play."""

    name: str
    model: nn.Module
    is_trained: bool
    call: Callable[..., Any] | None = None
    """What to call instead of the model, where ranks train it together."""
    uses_all: bool = True
    """Whether every trained parameter has a part in every call; of a VAE, the convolutions over time have none in a picture."""
    advice: Advice = Advice()
    sharding: Sharding | None = None
    """How its weights are spread over ranks, where they are."""
    flags: str = ""
    """What gives its weights their meaning, beside their names and shapes; a state of others is refused."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.call or self.model)(*args, **kwargs)

    def whole(self) -> AbstractContextManager[Any]:
        """Let each rank have all of a small model's weights for as long, also outside of a call; all ranks ask together."""
        return self.sharding.whole() if self.sharding is not None else nullcontext()

    def frozen(self) -> AbstractContextManager[Any]:
        """Let gradients pass through the model for as long without any for its own weights."""
        return self.sharding.frozen() if self.sharding is not None else _frozen(self.model)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Those that an optimiser changes, by name."""
        named = self.model.named_parameters() if self.is_trained else ()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @functools.cached_property
    def pieces(self) -> dict[str, Tensor]:
        """The model's state by name, where it is cut into pieces: this rank's; else nothing."""
        return dict(self.model.state_dict()) if self.sharding is not None else {}

    @property
    def saved_names(self) -> list[str]:
        """What of the model's state changes while training: trained parameters, and buffers, such as a spectral norm's."""
        if not self.is_trained:
            return []
        parameters = {name for name, _ in self.model.named_parameters()}
        buffers = [name for name in changing_state(self.model) if name not in parameters]
        return [*self.trained_parameters, *buffers]


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)


@dataclass
class Losses:
    """What a batch gives: one number to descend, averaged over the batch's samples, and numbers to look at.

    All stay on the device; the loop reads them once a logging interval.
    """

    total: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    culprits: Mapping[str, str] = field(default_factory=dict)
    """Metrics that must be finite, as the total must, each with the role whose fault it is if not, causes before effects."""


@dataclass(frozen=True)
class Turn:
    """One player's part of a step: the role that it trains and the losses of a batch."""

    role: str
    losses: Callable[[Batch], Losses]
    finish: Callable[[], None] | None = None
    """What follows once the role's weights are new, in every turn of a step."""


class Method(Protocol):
    """Roles and turns."""

    roles: Mapping[str, Role]
    turns: Sequence[Turn]

    def finish_step(self, ranks: Ranks) -> None:
        """Do what belongs after the last turn of a step, before anything is saved."""
        ...
