"""A block's tensors as one flat run of bytes, the same on the host, on disk streams and in a device slot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 256
"""Bytes; what the CUDA allocator gives, so that every view into a slot suits vectorised kernels."""


@dataclass(frozen=True)
class Member:
    """One parameter or buffer of a block: the tensor that modules hold, its name there, and where its bytes lie."""

    tensor: Tensor
    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Return the member's part of a flat run of bytes, as a tensor of its dtype and shape."""
        return flat[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class BlockLayout:
    """All members of one block and the bytes they take together."""

    members: tuple[Member, ...]
    num_bytes: int


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return every parameter and buffer once with its name, also where two modules share one."""
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        unique.setdefault(id(tensor), (name, tensor))
    return list(unique.values())


def travelling(block: nn.Module, *, train: bool) -> list[tuple[str, Tensor]]:
    """Return those of a block's tensors that are streamed; ``train`` says that whole blocks are trained.

    In a block that is frozen but for a few parameters, those are adapters: small, and an optimiser's on the device.
    """
    has_adapters = not train and not all(parameter.requires_grad for parameter in block.parameters())
    return [item for item in named_tensors(block) if not (has_adapters and item[1].requires_grad)]


def lay_out(tensors: Iterable[tuple[str, Tensor]]) -> BlockLayout:
    """Place tensors one behind the other."""
    members, offset = [], 0
    for name, tensor in tensors:
        members.append(Member(tensor, name, tensor.dtype, tensor.shape, offset))
        offset += align(members[-1].num_bytes)
    return BlockLayout(tuple(members), offset)


def align(num_bytes: int) -> int:
    """Round up to where the next tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
