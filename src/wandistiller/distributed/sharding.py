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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from wandistiller.distributed.pieces import local, piece_of

# Nobody here changes what a model returns in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class Sharding:
    """A model whose weights are spread over ranks, with what a training loop has to tell it."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        """Cut a model that is loaded or still on the meta device, block by block; without blocks it is one piece.

        One piece is for models whose layers are called again and again in a step, or differentiated twice: they are brought
        together once a turn and stay so until its last backward is done.
        """
        self.model = model
        self._is_one = not blocks
        for block in blocks:
            _shard(block, mesh)
        # Said explicitly: the next block is then on its way before the host has got through this one's kernels.
        for block, following in pairwise(blocks):
            cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
        # What is in no block stays whole from forward to backward, where there is one.
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        _shard(model, mesh, reshard_after_forward=False if self._is_one else None if is_trained else True)

    def fill(self, read: Callable[[str], Tensor], device: torch.device) -> None:
        """Give what is still on the meta device its values, one tensor at a time; of each only this rank's slice is kept."""
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        empty = [name for name, tensor in named.items() if tensor.is_meta]
        self.model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        with torch.no_grad():
            for name in empty:
                target, value = named[name], read(name)
                local(target).copy_(piece_of(value, target) if isinstance(target, DTensor) else value)

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


def _shard(unit: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool | None = None) -> None:
    """Make a module's weights, but for those that are cut already, one exchange; or two where their dtypes differ."""
    size = mesh.size(-1)

    def choose(parameter: nn.Parameter) -> Shard | None:
        return _choose_cut(parameter, size)

    options = {"mesh": mesh, "shard_placement_fn": choose, "reshard_after_forward": reshard_after_forward}
    apart = _of_main_dtype(unit)
    if apart:
        fully_shard(apart, **options)
    fully_shard(unit, **options)


def _choose_cut(parameter: nn.Parameter, size: int) -> Shard | None:
    """Return the dimension to cut along: the first, unless that would leave ranks without anything."""
    shape = parameter.shape
    if not shape or shape[0] >= size:
        return None
    # Along other dimensions FSDP2 cuts evenly or not at all.
    fitting = [dim for dim, length in enumerate(shape) if length and length % size == 0]
    return Shard(max(fitting, key=lambda dim: shape[dim])) if fitting else None


def _of_main_dtype(unit: nn.Module) -> list[nn.Module]:
    """Return the parts that are trained in the dtype that most is in, where there are others: gradients travel in one."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in _uncut(unit):
        sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return []
    main = sizes.most_common(1)[0][0]
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            dtypes = {parameter.dtype for parameter in _uncut(child)}
            if dtypes == {main} and not isinstance(child, FSDPModule):
                found.append(child)
            elif main in dtypes:
                visit(child)

    visit(unit)
    return found


def _uncut(module: nn.Module) -> list[nn.Parameter]:
    """Return trained parameters that are not cut yet."""
    return [each for each in module.parameters() if each.requires_grad and not isinstance(each, DTensor)]
