"""Activation policies: what a block keeps for backward, and where.

- ``none``: everything is kept, nothing is computed twice;
- ``full``: a block's input is kept, the rest is recomputed;
- ``selective``: what is dear to recompute is kept too, which is attention over long sequences.

Each can send what is kept to host memory. A policy works on any modules, blocks by default or the attention or feed-forward
parts in them, by wrapping their ``forward``: compile first, then choose a policy, then stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.errors import UsageError, nearest
from wandistiller.memory import attention
from wandistiller.memory.attached import attach_mark, remove_mark
from wandistiller.memory.kept import DeviceKeeper, HostKeeper, Keeper
from wandistiller.memory.recompute import Forward, recomputing, used_twice

Wrap = Callable[[nn.Module, Forward, Keeper], Forward]

POLICIES: dict[str, Wrap] = {}
GRANULARITIES: dict[str, tuple[str, ...]] = {
    "block": (),
    "attention": ("attention", "attn"),
    "feed_forward": ("feedforward", "feed_forward", "mlp", "layerff", "ffn"),
}
"""Pieces of class names, in small letters, that tell which parts of a block are meant; none for the block itself."""
RECOMPILATIONS = 64
"""How many variants of compiled code there may be."""


def register_policy(name: str) -> Callable[[Wrap], Wrap]:
    """Make a policy available under ``name``."""

    def register(wrap: Wrap) -> Wrap:
        POLICIES[name] = wrap
        return wrap

    return register


@dataclass
class ActivePolicy:
    """A policy at work; ``detach`` undoes it."""

    modules: Sequence[nn.Module]
    keeper: Keeper
    is_selective: bool
    is_detached: bool = False

    def detach(self) -> None:
        """Give every module its own ``forward`` back; once."""
        if self.is_detached:
            return
        self.is_detached = True
        for module in self.modules:
            remove_mark(module, "policy")
            original = module.__dict__.pop("_forward_without_policy", None)
            # A compiled forward is an attribute of the instance, the class's own is not.
            if original is not None and getattr(original, "__func__", None) is not type(module).forward:
                module.forward = original
            else:
                module.__dict__.pop("forward", None)
        if self.is_selective:
            attention.uninstall()


def allow_recompiling() -> None:
    """Let compiled code be compiled for as many shapes as data have.

    PyTorch gives up after eight, and from then on computes without: sizes of samples and captions, the last batch of an epoch,
    each with gradients and without, count, and all blocks together.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)


def compile_vae(vae: Any, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile both halves of a VAE: once for a shape of pictures, three times for one of clips, whose beginning is special."""
    allow_recompiling()
    for half in (vae.encoder, vae.decoder):
        half.forward = torch.compile(half.forward, backend=backend)


def prepare_blocks(
    blocks: Sequence[nn.Module], device: torch.device, ends: ExitStack, *, compiled: bool, policy: str, to_host: bool
) -> None:
    """Make blocks ready for training: compiled, and recomputed in backward until ``ends`` is closed."""
    if compiled:
        allow_recompiling()
        for block in blocks:
            block.forward = torch.compile(block.forward)
    if policy != "none" or to_host:
        ends.callback(apply_policy(blocks, policy, device, to_host=to_host).detach)


def apply_policy(
    blocks: Sequence[nn.Module],
    name: str,
    device: torch.device | str,
    *,
    to_host: bool = False,
    granularity: str = "block",
    keeper: Keeper | None = None,
) -> ActivePolicy:
    """Let blocks keep for backward what the policy says; outside of training nothing changes."""
    if name not in POLICIES:
        raise UsageError(f"There is no activation policy '{name}'{nearest(name, POLICIES)}", fix=f"Use {', '.join(POLICIES)}.")
    if granularity not in GRANULARITIES:
        known = ", ".join(GRANULARITIES)
        raise UsageError(f"There is no granularity '{granularity}'{nearest(granularity, GRANULARITIES)}", fix=f"Use {known}.")
    modules = list(dict.fromkeys(module for block in blocks for module in _parts(block, granularity)))
    if not modules:
        raise UsageError(f"These blocks have no {granularity} parts to recompute.", fix="Use the granularity 'block'.")
    _check_free(modules)
    keeper = keeper or (HostKeeper(torch.device(device)) if to_host else DeviceKeeper())
    for module in modules:
        module.__dict__["_forward_without_policy"] = module.forward
        attach_mark(module, "policy", "an activation policy")
        module.forward = POLICIES[name](module, module.forward, keeper)
    if name == "selective":
        attention.install()
    return ActivePolicy(modules, keeper, name == "selective")


def _check_free(modules: Iterable[nn.Module]) -> None:
    """Raise ``UsageError`` for modules that no policy can be given, before any of them has one."""
    for module in modules:
        if "_forward_without_policy" in module.__dict__:
            raise UsageError("These blocks have an activation policy already.", fix="Detach it first.")
        if module._compiled_call_impl is not None:
            raise UsageError(
                "These blocks are compiled by their method compile().",
                why="a policy has to be around what is compiled, and that would be around the policy.",
                fix="Compile them as block.forward = torch.compile(block.forward).",
            )


@register_policy("none")
def _keep_everything(module: nn.Module, forward: Forward, keeper: Keeper) -> Forward:
    if isinstance(keeper, DeviceKeeper):
        return forward

    @torch.compiler.disable  # compiled code may be within, not around
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        keeper.begin()
        with _saving_to(keeper, module):
            return forward(*args, **kwargs)

    return run


@register_policy("full")
def _recompute_everything(module: nn.Module, forward: Forward, keeper: Keeper) -> Forward:
    return recomputing(module, forward, keeper, keep_attention=False)


@register_policy("selective")
def _recompute_all_but_attention(module: nn.Module, forward: Forward, keeper: Keeper) -> Forward:
    return recomputing(module, forward, keeper, keep_attention=True)


def _parts(block: nn.Module, granularity: str) -> Iterator[nn.Module]:
    words = GRANULARITIES[granularity]
    if not words:
        yield block
        return
    for module in block.children():
        if any(word in type(module).__name__.lower() for word in words):
            yield module  # and nothing within it, which would be recomputed twice
        else:
            yield from _parts(module, granularity)


@contextmanager
def _saving_to(keeper: Keeper, module: nn.Module) -> Iterator[None]:
    """Let autograd's saved tensors be kept by a keeper, weights left alone and each tensor once."""
    weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    seen: dict[tuple[Any, ...], list[Any]] = {}

    def pack(tensor: Tensor) -> Any:
        tensor = tensor.detach()  # with its graph it would be part of what the graph holds, and never go away
        if tensor.untyped_storage()._cdata in weights or not tensor.is_contiguous():
            return tensor
        values = (tensor.shape, tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor._version)
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), *values)
        if key not in seen:
            # [kept, how many still want it, the tensor once it is back]
            seen[key] = [keeper.put(tensor), 0, None]
        seen[key][1] += 1
        return seen[key]

    def unpack(entry: Any) -> Tensor:
        if isinstance(entry, Tensor):
            return entry
        if entry[1] == 0:
            raise used_twice()
        if entry[2] is None:
            entry[2] = keeper.get(entry[0])
        tensor: Tensor = entry[2]
        entry[1] -= 1
        if entry[1] == 0:
            entry[2] = None
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
