"""What can be told of a block from outside: the tensors in what it takes and returns, and whether one was changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_DEPTH = 3
"""Objects within objects that are looked into."""


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
