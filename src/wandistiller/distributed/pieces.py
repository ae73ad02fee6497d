"""Tensors of which each rank has a piece: the piece, the whole, and pieces of what was whole before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

T = TypeVar("T", bound=Tensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's piece, which shares its memory; of a tensor that is not cut, the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all pieces together, on this rank's device; all ranks have to ask for it at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors whole and in host memory, one at a time over the device; on all ranks together."""
    return {name: whole(tensor.detach()).cpu() for name, tensor in tensors.items()}


def piece_of(tensor: Tensor, like: DTensor) -> Tensor:
    """Return the part of a whole tensor that a rank has of ``like``: a view."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is part of every mesh
    for place, (placement, size) in zip(coordinate, zip(like.placements, like.device_mesh.shape, strict=True), strict=True):
        if isinstance(placement, Shard):
            pieces = tensor.chunk(size, placement.dim)
            tensor = pieces[place] if place < len(pieces) else tensor.narrow(placement.dim, 0, 0)
    return tensor


def room_like(like: DTensor, dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor that is cut as ``like`` is."""
    return torch.empty_like(like.detach(), dtype=dtype)


def by_kind(tensors: Iterable[T]) -> list[list[T]]:
    """Return those that are cut and those that are not, as far as there are any: one operation cannot take both."""
    found = list(tensors)
    kinds = ([each for each in found if isinstance(each, DTensor) is is_cut] for is_cut in (True, False))
    return [kind for kind in kinds if kind]


def piece_number(tensor: Tensor) -> int:
    """Return which piece this rank has, the same on ranks that have the same; 0 of a tensor that is not cut."""
    if not isinstance(tensor, DTensor):
        return 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    cut = [place for place, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Shard)]
    return cut[0] if cut else 0
