"""From losses to new weights: scaling, clipping, the schedule, master copies; and all of its state by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from wandistiller.distributed.pieces import by_kind, whole
from wandistiller.errors import UsageError
from wandistiller.train.optimisers import StochasticAdamW, make_optimiser
from wandistiller.train.schedules import rate_factor

MixedPrecision = Literal["no", "bf16", "fp16"]
Rounding = Literal["masters", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class OptimiserOptions:
    """What is asked of an optimiser."""

    name: str = "adamw"
    rate: float = 1e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float | None = 1.0
    """Most that the norm of all gradients may be; None for no limit."""
    schedule: str = "constant"
    warmup_steps: int = 0
    num_steps: int = 1
    rounding: Rounding = "masters"
    """For weights in 16 bits."""
    seed: int = 0


def autocast(precision: MixedPrecision, device: torch.device, *, caches: bool = True) -> AbstractContextManager[Any]:
    """Compute in 16 bits where that is safe, with the weights as they are; ``caches`` keeps those made for the call."""
    if precision == "no":
        return nullcontext()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype=dtype, cache_enabled=caches)


OTHER_WEIGHTS = "its weights mean something else with these."
"""Why a role's state is refused where it was made with other flags."""


def optimiser_flags(name: str, rounding: str, *, is_short: bool) -> str:
    """Return what a state of an optimiser on the device belongs to; ``is_short`` are weights of 16 bits."""
    return f"--optimizer {name}" + (f" --weights-dtype bfloat16 --rounding {rounding}" if is_short else "")


def refuse_other_flags(
    facts: Mapping[str, Any], flags: str, why: str = "the optimiser's state is of no use to another kind."
) -> None:
    """Raise ``UsageError`` for a state that was made with other flags; states of earlier versions do not say theirs."""
    if (facts.get("flags") or flags) != flags:
        raise UsageError(
            f"The state is of another training: it was made with {facts['flags']}, and this one has {flags}.",
            why=why,
            fix="Resume with the flags that it was started with, or begin a new run from its result.",
        )


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, over all ranks where each has a piece."""
    norms = [whole(nn.utils.get_total_norm(kind)) for kind in by_kind(gradients)] or [nn.utils.get_total_norm([])]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


class Optimises(Protocol):
    """What the loop needs of an optimiser, wherever its state is."""

    @property
    def rate(self) -> float: ...

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by against gradients that vanish in float16, else 1; reading it waits for the device."""
        ...

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None: ...

    def step(self, number: int) -> Tensor: ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def like(self, key: str) -> Tensor | None:
        """Return the weight that a tensor of the state belongs to, by the tensor's name; None where none is cut into pieces."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None: ...


def travels_in(precision: MixedPrecision) -> torch.dtype | None:
    """Return the dtype that ranks bring slices of float32 weights together in, where it is another one."""
    # Not for float16: its scaler takes slices or whole gradients, and some weights would stay whole.
    return torch.bfloat16 if precision == "bf16" else None


class Optimisation:
    """One optimiser with what belongs to it."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: OptimiserOptions,
        precision: MixedPrecision,
        device: torch.device,
        *,
        keeps_gradients: bool = False,
    ) -> None:
        """``keeps_gradients`` zeroes them after a step instead of dropping them, for those who hold on to them."""
        self.parameters = dict(parameters)
        self.options = options
        self._keeps_gradients = keeps_gradients
        # float16 gradients below 6e-8 would vanish, so the loss is scaled up and gradients down again.
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        # In order: that in which copies are made decides how they lie in memory.
        is_short = [name for name, parameter in self.parameters.items() if parameter.dtype.itemsize < 4]
        self._flags = optimiser_flags(options.name, options.rounding, is_short=bool(is_short))
        self._masters: dict[str, nn.Parameter] = {}
        if is_short and options.rounding == "masters":
            self._masters = {name: nn.Parameter(self.parameters[name].detach().float()) for name in is_short}
        stepped = list(self._stepped().values())
        if is_short and options.rounding == "stochastic":
            self.optimiser: torch.optim.Optimizer = StochasticAdamW(
                stepped, rate=options.rate, weight_decay=options.weight_decay, betas=options.betas, seed=options.seed
            )
        else:
            self.optimiser = make_optimiser(
                options.name, stepped, rate=options.rate, weight_decay=options.weight_decay, betas=options.betas
            )

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Add a loss's gradients to those of the step; ``is_last`` says that the step's are complete with these."""
        self._scaler.scale(loss).backward()

    def step(self, number: int) -> Tensor:
        """Change the weights in the step with this number, counted from 0; return the norm of all gradients, on the device."""
        for name, master in self._masters.items():
            gradient = self.parameters[name].grad
            master.grad = None
            if gradient is not None:
                master.grad = gradient.float()
                if self._keeps_gradients:
                    gradient.zero_()
                else:
                    self.parameters[name].grad = None
        options = self.options
        for group in self.optimiser.param_groups:
            factor = rate_factor(options.schedule, number, warmup_steps=options.warmup_steps, num_steps=options.num_steps)
            group["lr"] = options.rate * factor
        self._scaler.unscale_(self.optimiser)
        stepped = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        limit = float("inf") if options.clip_norm is None else options.clip_norm
        norm = total_norm([parameter.grad for parameter in stepped if parameter.grad is not None])
        for parameters in by_kind(stepped):
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self._scaler.step(self.optimiser)
        self._scaler.update()
        self.optimiser.zero_grad(set_to_none=not self._keeps_gradients)
        with torch.no_grad():
            for name, master in self._masters.items():
                self.parameters[name].copy_(master)
        return norm.detach()

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return float(self.optimiser.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float:
        return float(self._scaler.get_scale())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all state: tensors by name, and plain values."""
        tensors = {f"master.{name}": master.detach() for name, master in self._masters.items()}
        values: dict[str, Any] = {}
        for name, parameter in self._stepped().items():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                target: dict[str, Any] = tensors if isinstance(value, Tensor) else values
                target[f"state.{name}:{key}"] = value
        return tensors, {"flags": self._flags, "values": values, "scaler": self._scaler.state_dict()}

    def like(self, key: str) -> Tensor | None:
        kind, _, rest = key.partition(".")
        return self.parameters.get(rest if kind == "master" else rest.rpartition(":")[0])

    def _stepped(self) -> dict[str, nn.Parameter]:
        """Return what the optimiser works on, by the names of the weights."""
        return {name: self._masters.get(name, parameter) for name, parameter in self.parameters.items()}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take up a state again."""
        refuse_other_flags(facts, self._flags)
        # Not through load_state_dict, which rounds moments to the dtype of their weights.
        stepped = self._stepped()
        is_fused = bool(self.optimiser.param_groups[0].get("fused"))
        for key, value in (*tensors.items(), *facts["values"].items()):
            if key.startswith("state."):
                name, _, entry = key.removeprefix("state.").rpartition(":")
                if isinstance(value, Tensor) and (entry != "step" or is_fused):
                    value = value.to(stepped[name].device)
                if isinstance(value, Tensor) and _differ_in_layout(value, stepped[name]):
                    # Fused optimisers walk through memory, and would give moments to other weights than theirs.
                    value = torch.empty_like(stepped[name], dtype=value.dtype).copy_(value)
                self.optimiser.state[stepped[name]][entry] = value
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tensors[f"master.{name}"])
        if self._scaler.is_enabled() and facts["scaler"]:  # empty after steps in another precision
            self._scaler.load_state_dict(dict(facts["scaler"]))


def _differ_in_layout(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.stride() != second.stride()
