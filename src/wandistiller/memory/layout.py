"""A block's tensors as one flat run of bytes, the same on the host, on disk streams and in a device slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def travelling(model: nn.Module, blocks: Sequence[nn.Module], *, train: bool) -> list[list[tuple[str, Tensor]]]:
    """Return those of each block's tensors that are streamed; ``train`` says that whole blocks are trained.

    In a block that is frozen but for a few parameters, those are adapters: small, and an optimiser's on the device. What two
    blocks share, or a block and the rest of the model, is needed when other blocks are in the slots, so it stays there too,
    and so do running statistics, which forward itself changes without counting it as a change.
    """
    users: dict[int, set[int]] = {}
    for position, block in enumerate(blocks):
        for _, tensor in named_tensors(block):
            users.setdefault(id(tensor), set()).add(position)
    ids = {id(block) for block in blocks}
    paths = tuple(
        f"{name}." if name else "" for name, module in model.named_modules(remove_duplicate=False) if id(module) in ids
    )
    everywhere = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    staying = {id(tensor) for name, tensor in everywhere if not name.startswith(paths)}
    staying |= {key for key, positions in users.items() if len(positions) > 1}
    changing = [each for block in blocks for each in block.modules() if getattr(each, "track_running_stats", False)]
    staying |= {id(buffer) for module in changing for buffer in module.buffers(recurse=False)}
    found = []
    for block in blocks:
        has_adapters = not train and not all(parameter.requires_grad for parameter in block.parameters())
        own = [item for item in named_tensors(block) if id(item[1]) not in staying]
        found.append([item for item in own if not (has_adapters and item[1].requires_grad)])
    return found


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


def unbind(tensor: Tensor) -> None:
    """Take the values of a tensor that modules hold: it is on the meta device then."""
    other = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)


def bind(tensor: Tensor, value: Tensor) -> None:
    """Let a tensor that modules hold have other values; one on the meta device changes its kind, not its identity."""
    if not tensor.is_meta:
        tensor.data = value
    else:
        # Made empty and given its values afterwards, so that it does not share the slot's count of changes: autograd would
        # take each block that arrives for a change of all the others.
        other = torch.empty(0, dtype=value.dtype, device=value.device)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, requires_grad=tensor.requires_grad)
        other.data = value
        torch.utils.swap_tensors(tensor, other)
