"""What can be told of a block from outside: the tensors in what it takes and returns, whether one was changed, whose result it
is, and whether it is forward's turn or backward's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_DEPTH = 3
"""Objects within objects that are looked into."""
_NOBODY = object()


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in a tuple, list or dict, and in the attributes of objects that PyTorch's trees do not look into."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth:
            yield from tensors_in(_attributes(leaf), depth - 1)


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, (nn.Module, type)):
        return []
    if dataclasses.is_dataclass(value):  # it may have no __dict__
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; of what was made in inference mode nobody counts that."""
    return 0 if tensor.is_inference() else tensor._version


def direction() -> int:
    """Return 1 in forward and -1 in backward. A forward inside of a backward is a recomputation: the block before is next."""
    return 1 if torch._C._current_graph_task_id() == -1 else -1


class CalledWith:
    """What a block was called with, to tell its own results from what it hands through as it came."""

    def __init__(self) -> None:
        self._makers: dict[int, Any] = {}
        """What made each tensor, by the tensor's identity."""

    def note(self, given: Any) -> None:
        """Remember what it is called with now."""
        is_learning = torch.is_grad_enabled()
        self._makers = {id(each): each.grad_fn for each in tensors_in(given) if each.requires_grad} if is_learning else {}

    def results(self, output: Any) -> list[Tensor]:
        """Return what it has made itself and backward comes through: what it hands through is another block's result."""
        makers, self._makers = self._makers, {}
        return [each for each in tensors_in(output) if each.requires_grad and makers.get(id(each), _NOBODY) is not each.grad_fn]
