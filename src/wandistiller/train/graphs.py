"""Small models through CUDA graphs: the computation of each shape of batch is recorded once and then replayed.

A model of a few million parameters spends most of a step on launching kernels, not on running them. A replay launches all of
them at once. What is computed is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import UsageError
from wandistiller.train.optimisation import MixedPrecision, autocast


def check_can_graph(device: torch.device, ranks: Ranks) -> None:
    """Raise ``UsageError`` where there is nothing to record on."""
    if device.type != "cuda" or ranks.world_size > 1:
        what = f"the device is {device}" if device.type != "cuda" else f"{ranks.world_size} ranks train together"
        raise UsageError("--cuda-graphs is for one CUDA device.", why=f"{what}.", fix="Leave it away.")


class GraphedCalls:
    """Calls a model that is trained on one CUDA device; without gradients it is called as ever.

    Gradients add up in tensors of their own, which must stay: ``Optimisation`` has to zero them rather than drop them.
    """

    def __init__(self, model: nn.Module, precision: MixedPrecision, device: torch.device) -> None:
        self._model = model
        self._precision = precision
        self._device = device
        self._recorded: dict[Any, nn.Module] = {}
        # Gradients are added up on another stream than a graph is recorded on, which PyTorch warns of and waits for.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def __call__(self, *args: Tensor, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._model(*args, **kwargs)
        given = {str(number): value for number, value in enumerate(args)} | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        key = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        if key not in self._recorded:
            self._recorded[key] = self._record(given, tensors)
        results = self._recorded[key](*tensors.values())
        # The next replay writes into the same memory.
        return tuple(result.clone() for result in results)

    def _record(self, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        pure = _PureCall(self._model, given, tuple(tensors), self._precision, self._device)
        samples = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in tensors.values())
        with torch.autocast(self._device.type, enabled=False):
            # One try sets libraries up; of several, each would begin beside the gradients of the last.
            recorded: nn.Module = torch.cuda.make_graphed_callables(pure, samples, allow_unused_input=True, num_warmup_iters=1)
        return recorded


class _PureCall(nn.Module):
    """A call of a model as a function of tensors alone."""

    def __init__(
        self,
        model: nn.Module,
        given: Mapping[str, Any],
        names: tuple[str, ...],
        precision: MixedPrecision,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = model
        self._constants = {name: value for name, value in given.items() if name not in names}
        self._names = names
        self._precision = precision
        self._device = device

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = {**self._constants, **dict(zip(self._names, tensors, strict=True))}
        positional = [given.pop(name) for name in sorted((name for name in given if name.isdigit()), key=int)]
        # Weights in 16 bits must not outlive the graph that made them.
        with autocast(self._precision, self._device, caches=False):
            results = self.model(*positional, **given)
        return results if isinstance(results, tuple) else (results,)
