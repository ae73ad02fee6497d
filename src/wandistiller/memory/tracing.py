"""What a model's passes would take of a card, found out without a card and without weights.

The model's own code runs on fake tensors, which have shapes and no numbers. Every tensor that is made or dies on the way is
told to a model of PyTorch's allocator, in order, so that what comes out is not only what is in use at the worst moment but what
the process would hold, fragments included.

On fake tensors of the CPU attention takes a flash kernel, as it does on a card; an RMS norm, which the CPU computes in several
steps, is put in as the one kernel that it is on a card.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wandistiller.memory.activations import apply_policy
from wandistiller.memory.allocator_model import AllocatorModel
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.units import Bytes

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A transformer and what it is given."""

    config: Mapping[str, Any]
    latent_shape: tuple[int, int, int, int]
    """Channels, frames, height, width."""
    batch_size: int = 1
    text_tokens: int = 512
    dtype: torch.dtype = torch.bfloat16
    is_trained: bool = False
    """Whether backward runs too, for all weights."""
    policy: str = "none"


@dataclass(frozen=True)
class Traced:
    """Bytes of a card."""

    weights: Bytes
    allocated: Bytes
    """In use at the worst moment."""
    reserved: Bytes
    """Held by the process, without what the driver takes."""


class AllocationTrace(TorchDispatchMode):
    """Tells an allocator's model of every tensor that is made inside of the ``with`` block, and of its end."""

    def __init__(self) -> None:
        super().__init__()
        self.model = AllocatorModel()
        self._keys: dict[int, int] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.note(leaf)
        return out

    def note(self, tensor: Tensor) -> None:
        """Count a tensor, once for all that share its memory."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._keys:
            return
        self._count += 1
        self._keys[place] = self._count
        self.model.allocate(self._count, storage.nbytes())
        weakref.finalize(storage, self._end, place, self._count)

    def _end(self, place: int, key: int) -> None:
        if self._keys.get(place) == key:
            del self._keys[place]
        self.model.free(key)


@contextmanager
def tracing() -> Iterator[AllocationTrace]:
    """Let everything inside run on fake tensors, and count them."""
    plain = functional.rms_norm
    functional.rms_norm = _rms_norm
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), AllocationTrace() as trace:
            yield trace
    finally:
        functional.rms_norm = plain


def trace_transformer(workload: Workload, *, num_steps: int = 2) -> Traced:
    """Run a transformer forward, and backward where it is trained, until its memory has settled."""
    empty = build_empty(TRANSFORMER, workload.config, dtype=workload.dtype)
    with tracing() as trace:
        model = _materialise(empty)
        weights = trace.model.allocated
        model.requires_grad_(workload.is_trained).train(workload.is_trained)
        if workload.policy != "none":
            apply_policy(list(model.get_submodule("blocks").children()), workload.policy, _CPU)
        inputs = (
            torch.empty(workload.batch_size, *workload.latent_shape, dtype=workload.dtype),
            torch.empty(workload.batch_size),
            torch.empty(workload.batch_size, workload.text_tokens, workload.config["text_dim"], dtype=workload.dtype),
        )
        for _ in range(num_steps):
            _step(model, inputs, is_trained=workload.is_trained)
        found = trace.model
        return Traced(Bytes(weights), Bytes(found.peak_allocated), Bytes(found.reserved))


def _step(model: nn.Module, inputs: tuple[Tensor, ...], *, is_trained: bool) -> None:
    with torch.set_grad_enabled(is_trained):
        out: Tensor = model(*inputs, return_dict=False)[0]
        if is_trained:
            out.float().square().mean().backward()
            model.zero_grad(set_to_none=True)


def _materialise(model: nn.Module) -> nn.Module:
    """Give a model on the meta device fake weights on the CPU, in the order in which they would be loaded."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


class _RmsNorm(torch.autograd.Function):
    """What one kernel of a card makes and keeps: the result, and for backward the input and a number a row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None) -> Tensor:
        rows = torch.empty((*values.shape[:-1], 1), dtype=torch.float32)
        ctx.has_weight = weight is not None
        ctx.save_for_backward(values, *([weight] if weight is not None else []), rows)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        values, *rest = ctx.saved_tensors
        weight = torch.empty_like(rest[0]) if ctx.has_weight and ctx.needs_input_grad[1] else None
        return torch.empty_like(values), weight


def _rms_norm(values: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    apply: Callable[..., Tensor] = _RmsNorm.apply
    return apply(values, weight)
