"""FSDP2 from outside: a model's blocks, each cut into slices of which every rank keeps one.

Before a block computes, the ranks bring its slices together, a block ahead of its use; afterwards the whole is dropped, and its
gradients go back as slices. So a rank holds its slices, two whole blocks, and what is in no block. Optimisers, averages and
checkpoints see slices alone.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from wandistiller.distributed.pieces import local, piece_of
from wandistiller.models.devices import CAST_LAYERS

# Nobody here changes what a model returns in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class Sharding:
    """A model whose weights are spread over ranks, with what a training loop has to tell it."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, autocast: torch.dtype | None = None
    ) -> None:
        """Cut a model that is loaded or still on the meta device, block by block; without blocks it is one piece.

        ``autocast`` is the dtype that weights in float32 are computed in: what autocast would cast is brought together in it.
        One piece is for models whose layers are called again and again in a step, or differentiated twice: they are brought
        together once a turn and stay so until its last backward is done.
        """
        self.model = model
        self._is_one = not blocks
        # A unit travels in one dtype. The few weights that are used in float32 beside those in 16 bits, such as those of norms,
        # are therefore whole on every rank, and their gradients averaged.
        self._whole = [parameter for block in blocks for parameter in _shard(block, mesh, autocast)]
        # Said explicitly: the next block is then on its way before the host has got through this one's kernels.
        for block, following in pairwise(blocks):
            cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
        # What is in no block stays whole from forward to backward, where there is one.
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        after_forward = False if self._is_one else None if is_trained else True
        self._whole += _shard(model, mesh, autocast, reshard_after_forward=after_forward)
        for parameter in self._whole:
            if not parameter.is_meta:
                parameter.data = parameter.data.to(mesh.device_type)

    def fill(self, read: Callable[[str], Tensor], device: torch.device) -> None:
        """Give what is still on the meta device its values, one tensor at a time; of each only this rank's slice is kept."""
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        empty = [name for name, tensor in named.items() if tensor.is_meta]
        # In the model's order, which is the same on all ranks: their gradients travel in it.
        whole = [name for name, parameter in named.items() if any(parameter is each for each in self._whole)]
        self.model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        with torch.no_grad():
            for name in empty:
                target, value = named[name], read(name)
                local(target).copy_(piece_of(value, target) if isinstance(target, DTensor) else value)
        self._whole = [cast(nn.Parameter, named[name]) for name in whole]

    def begin_losses(self) -> None:
        """Call before losses are computed: derivatives that they are made of are no step's gradients."""
        if self._is_one:
            self._root.set_requires_gradient_sync(False)
            self._root.set_reshard_after_backward(False)
            self._root.set_is_last_backward(False)

    def begin_backward(self, *, is_last: bool, uses_all: bool) -> None:
        """Call before the backward of a micro-batch; with a step's last one ranks exchange gradients."""
        self._root.set_requires_gradient_sync(is_last)
        self._root.set_is_last_backward(is_last)
        if is_last and not uses_all:
            # Ranks exchange all gradients of a piece in one go, so each of them has to have all.
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def end_backward(self, *, is_last: bool) -> None:
        """Call after the backward of a micro-batch; the weights are about to change when it was a step's last."""
        if is_last and self._is_one:
            self._root.reshard()
        gradients = [parameter.grad for parameter in self._whole if parameter.grad is not None] if is_last else []
        if gradients:
            together = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(together)
            together /= dist.get_world_size()
            for gradient, mean in zip(gradients, together.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let this rank have the whole weights of a model in one piece for as long; all ranks have to ask together."""
        assert self._is_one, "a model in blocks is too large to be whole anywhere"
        self._root.unshard()
        try:
            yield
        finally:
            self._root.reshard()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let gradients pass through the model for as long without any for its own weights."""
        # What is registered now may be the slices or the whole; the whole takes this over from the slices.
        self._root.reshard()
        self.model.requires_grad_(False)
        try:
            yield
        finally:
            self._root.reshard()
            self.model.requires_grad_(True)

    @property
    def _root(self) -> FSDPModule:
        return cast(FSDPModule, self.model)


def _shard(
    unit: nn.Module, mesh: DeviceMesh, autocast: torch.dtype | None, *, reshard_after_forward: bool | None = None
) -> list[nn.Parameter]:
    """Make a module's weights, but for those that are cut already, one exchange; return those that stay whole."""
    size = mesh.size(-1)

    def choose(parameter: nn.Parameter) -> Shard | None:
        return _choose_cut(parameter, size)

    dtype = _main_dtype(unit)
    is_cast = autocast is not None and dtype == torch.float32
    odd = [
        parameter
        for module in _own_modules(unit)
        for parameter in module.parameters(recurse=False)
        if (parameter.requires_grad and parameter.dtype != dtype) or (is_cast and not isinstance(module, CAST_LAYERS))
    ]
    # What autocast casts on one card travels so, and autograd keeps no casts; gradients are added up in float32 all the same.
    policy = MixedPrecisionPolicy(autocast, torch.float32, cast_forward_inputs=False) if is_cast else MixedPrecisionPolicy()
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    fully_shard(unit, shard_placement_fn=choose, ignored_params=set(odd), **options)
    return odd


def _choose_cut(parameter: nn.Parameter, size: int) -> Shard | None:
    """Return the dimension to cut along: the first, unless that would leave ranks without anything."""
    shape = parameter.shape
    if not shape or shape[0] >= size:
        return None
    # Along other dimensions FSDP2 cuts evenly or not at all.
    fitting = [dim for dim, length in enumerate(shape) if length and length % size == 0]
    return Shard(max(fitting, key=lambda dim: shape[dim])) if fitting else None


def _main_dtype(unit: nn.Module) -> torch.dtype | None:
    """Return the dtype that most of a unit is trained in; None where nothing is."""
    sizes: Counter[torch.dtype] = Counter()
    for module in _own_modules(unit):
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """Yield a unit's modules, but for units in it."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)
