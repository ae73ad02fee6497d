"""Context parallelism: ranks that compute one clip together, each with a share of its tokens.

Everything in a Wan transformer but self-attention treats tokens one by one, so a rank's share goes through all blocks by
itself. For self-attention each rank takes some of the heads for all tokens (diffusers' Ulysses), or, where the heads cannot
be divided by the ranks, asks all ranks' keys and values about its own tokens.

Shares are of one length, so the last ranks may have padding, which no token sees. diffusers can also do without padding, but
not over gloo, and its ring needs kernels that the CPU does not have.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from wandistiller.distributed.failures import is_rank
from wandistiller.distributed.ranks import Ranks, make_mesh
from wandistiller.errors import UsageError


def check_clip_groups(flag: str, size: int, ranks: Ranks) -> None:
    """Raise ``UsageError`` where ranks cannot form groups of ``size``; nothing is loaded."""
    if size == 1:
        return
    if not is_rank():
        raise UsageError(
            f"{flag} {size} was given, but torchrun did not start this.",
            why=f"{size} processes are to compute each clip together.",
            fix=f"Start it with torchrun --nproc-per-node {size} -m wandistiller, or leave {flag} away.",
        )
    if ranks.world_size % size:
        fitting = [str(number) for number in range(1, ranks.world_size + 1) if ranks.world_size % number == 0]
        raise UsageError(
            f"{ranks.world_size} ranks cannot be split into groups of {size}.",
            why=f"with {flag} each group computes a clip together.",
            fix=f"Give {flag} {' or '.join(fitting)}, or start another number of ranks.",
        )


class ClipGroup:
    """The ranks that this one computes clips with; neighbours, so that they are on one machine where possible."""

    def __init__(self, size: int, ranks: Ranks, device: torch.device) -> None:
        """Form groups of ``size``: on all ranks at the same time, once they have joined."""
        self.size = size
        self.number, self.place = divmod(ranks.rank, size)
        self.count = ranks.world_size // size
        mesh = make_mesh(device, (self.count, 1, size), ("clip", "ring", "ulysses"))
        self._group = mesh.get_group("ulysses")
        self._by_heads: ParallelConfig | None = None
        if size > 1:
            self._by_heads = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=size))
            self._by_heads.setup(ranks.rank, ranks.world_size, device, mesh=mesh)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its group."""
        return self.place == 0

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank of the group has, on all of them."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def from_place(self, place: int, tensor: Tensor) -> Tensor:
        """Return the tensor of one rank on all of the group; the others give one of the same shape, which is written over."""
        dist.broadcast(tensor, self.number * self.size + place, group=self._group)
        return tensor

    def spread(self, model: nn.Module) -> None:
        """Let a Wan transformer compute in shares from now on; its answers are whole, and the same on all ranks.

        The model may still be empty. All ranks of the group have to call it at the same time and with the same inputs.
        """
        if self._by_heads is None:
            return
        shares = _Shares(self)
        blocks = list(model.get_submodule("blocks").children())
        model.register_forward_pre_hook(shares.take_timesteps, with_kwargs=True)
        model.get_submodule("rope").register_forward_hook(shares.take_positions)
        blocks[0].register_forward_pre_hook(shares.take_tokens)
        model.get_submodule("proj_out").register_forward_hook(shares.bring_together)
        for block in blocks:
            attention: Any = block.get_submodule("attn1")
            attention.set_processor(_SharedAttention(shares, self._by_heads if attention.heads % self.size == 0 else None))

    def share(self, whole: Tensor) -> Tensor:
        """Return this rank's share of the tokens (batch, tokens, ...), padded with zeros to the length of the others'."""
        length = -(-whole.shape[1] // self.size)
        share = whole[:, self.place * length : (self.place + 1) * length]
        missing = length - share.shape[1]
        return functional.pad(share, (0, 0) * (whole.ndim - 2) + (0, missing)) if missing else share.contiguous()

    def whole(self, share: Tensor, num_tokens: int) -> Tensor:
        """Return all ranks' shares (batch, tokens, ...) as one, without padding."""
        share = share.contiguous()
        shares = [torch.empty_like(share) for _ in range(self.size)]
        dist.all_gather(shares, share, group=self._group)
        return torch.cat(shares, dim=1)[:, :num_tokens]


class _Shares:
    """What is cut into shares on its way into the blocks of one model, and brought together behind them."""

    def __init__(self, group: ClipGroup) -> None:
        self.group = group
        self.num_tokens = 0
        """Of the clip that is being computed."""

    def take_timesteps(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut timesteps where each token has its own."""
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        if timestep.ndim == 1:
            return None
        share = self.group.share(timestep)
        return (args, {**kwargs, "timestep": share}) if "timestep" in kwargs else ((args[0], share, *args[2:]), kwargs)

    def take_positions(self, rope: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self.group.share(each) for each in output)

    def take_tokens(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.num_tokens = args[0].shape[1]
        return (self.group.share(args[0]), *args[1:])

    def bring_together(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self.group.whole(output, self.num_tokens)


class _SharedAttention(WanAttnProcessor):
    """Self-attention of a share of the tokens to all of them."""

    # The one that calls PyTorch's function, whatever the environment asks for.
    _attention_backend = "native"

    def __init__(self, shares: _Shares, by_heads: ParallelConfig | None) -> None:
        """``by_heads`` lets diffusers exchange tokens for heads; without it keys and values are gathered."""
        super().__init__()
        self._shares = shares
        self._parallel_config = by_heads

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        plain = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = partial(self._attend, plain)
        try:
            result: Tensor = super().__call__(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = plain
        return result

    def _attend(self, plain: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attend to every token and to no padding; all are (batch, heads, tokens, width)."""
        num_tokens = self._shares.num_tokens
        if self._parallel_config is None:
            both = torch.cat([key, value]).transpose(1, 2)
            key, value = self._shares.group.whole(both, num_tokens).transpose(1, 2).chunk(2)
        result: Tensor = plain(query=query, key=key[:, :, :num_tokens], value=value[:, :, :num_tokens], **options)
        return result
