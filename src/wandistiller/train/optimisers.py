"""Optimisers by name, and what keeps small updates alive in 16-bit weights.

A bfloat16 weight near 1 cannot take an update below 0.004, and most are. Two ways around that: ``masters``, a float32 copy that
the optimiser works on, or ``stochastic`` rounding, which is right on average and needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.distributed.pieces import by_kind, local, piece_number
from wandistiller.errors import UsageError, nearest

MakeOptimiser = Callable[[Sequence[nn.Parameter], float, float, tuple[float, float]], torch.optim.Optimizer]

OPTIMISERS: dict[str, MakeOptimiser] = {}


def register_optimiser(name: str) -> Callable[[MakeOptimiser], MakeOptimiser]:
    """Make an optimiser available under ``name``."""

    def register(make: MakeOptimiser) -> MakeOptimiser:
        OPTIMISERS[name] = make
        return make

    return register


def make_optimiser(
    name: str, parameters: Iterable[nn.Parameter], *, rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Return an optimiser by name."""
    if name not in OPTIMISERS:
        raise UsageError(f"There is no optimiser '{name}'{nearest(name, OPTIMISERS)}", fix=f"Use {', '.join(OPTIMISERS)}.")
    return OPTIMISERS[name](list(parameters), rate, weight_decay, betas)


def check_optimiser(name: str) -> None:
    """Raise what making an optimiser would raise, as where its package is missing; nothing is loaded."""
    make_optimiser(name, [nn.Parameter(torch.zeros(1))], rate=0.0, weight_decay=0.0, betas=(0.9, 0.999))


@register_optimiser("adamw")
def _adamw(
    parameters: Sequence[nn.Parameter], rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    is_fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    groups = [{"params": kind} for kind in by_kind(parameters)]
    return torch.optim.AdamW(groups, lr=rate, betas=betas, weight_decay=weight_decay, fused=is_fused)


@register_optimiser("adafactor")
def _adafactor(
    parameters: Sequence[nn.Parameter], rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=rate, weight_decay=weight_decay)


@register_optimiser("adamw8bit")
def _adamw8bit(
    parameters: Sequence[nn.Parameter], rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        raise UsageError(
            "The 8-bit optimiser needs bitsandbytes.",
            why=str(error),
            fix="Install it with: pip install 'wandistiller[low-bit]'",
        ) from error
    optimiser: torch.optim.Optimizer = AdamW8bit(parameters, lr=rate, betas=betas, weight_decay=weight_decay)
    return optimiser


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 weights: float32 moments, and a new weight that is rounded up or down with the odds that are right."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, rate: float, weight_decay: float, betas: tuple[float, float], seed: int
    ) -> None:
        super().__init__(list(parameters), {"lr": rate, "weight_decay": weight_decay, "betas": betas, "eps": 1e-8})
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, group, index)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], index: int) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2))
        state["step"] += 1
        step, (first, second) = int(state["step"].item()), group["betas"]
        # Of what is spread over ranks, each updates its piece.
        gradient, weights = local(parameter.grad).float(), local(parameter)
        average = local(state["exp_avg"]).lerp_(gradient, 1 - first)
        square = local(state["exp_avg_sq"]).mul_(second).addcmul_(gradient, gradient, value=1 - second)
        spread = (square / (1 - second**step)).sqrt_().add_(group["eps"])
        value = weights.float().mul_(1 - group["lr"] * group["weight_decay"])
        value.addcdiv_(average, spread, value=-group["lr"] / (1 - first**step))
        if weights.dtype == torch.bfloat16:
            # Seeded by the step, the parameter and the piece, so that a resumed run rounds as an uninterrupted one, and
            # ranks with the same piece round it alike.
            number = step * 1_000_003 + index + piece_number(parameter) * 2**40
            value = round_stochastically(value, self._generator(parameter.device, number))
        weights.copy_(value)

    def _generator(self, device: torch.device, number: int) -> torch.Generator:
        generator = self._generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed((self._seed * 0x9E3779B97F4A7C15 + number) % 2**63)


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to bfloat16 so that the mean over many roundings is the value itself."""
    # bfloat16 is the upper half of a float32: noise in the lower half carries over with just the right odds.
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = (values.view(torch.int32) + noise) & -(2**16)
    return bits.view(torch.float32).to(torch.bfloat16)
