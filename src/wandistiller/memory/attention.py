"""Attention whose result can be kept while everything around it is recomputed.

Of all that a transformer block computes, attention over long sequences is the dearest for the bytes of its result. While a
``Ledger`` is recording, results are noted; while it replays, they are handed out again instead of being computed, and backward
works on them and on the recomputed query, key and value. It is an operator of its own, so that compiled blocks call it too.

``keeping_attention`` puts it in the place of ``torch.nn.functional.scaled_dot_product_attention``, which all of diffusers'
models call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend

MIN_KEYS = 1024
"""Shorter sequences are cheaper to recompute than to keep."""

_Pair = tuple[Tensor, Tensor]
_plain_attention = functional.scaled_dot_product_attention
_installed = 0
_is_keeping = False
_ledger: Ledger | None = None


class Ledger:
    """Results of one block's attention calls in their order."""

    def __init__(self) -> None:
        self.results: list[_Pair] = []
        self.is_replaying = False


@contextmanager
def ledger_in_use(ledger: Ledger | None) -> Iterator[None]:
    """Note or replay the attention of the computation inside, or with no ledger, compute it in the same way."""
    global _ledger, _is_keeping
    before, _ledger = _ledger, ledger
    was_keeping, _is_keeping = _is_keeping, True
    try:
        yield
    finally:
        _ledger, _is_keeping = before, was_keeping


@contextmanager
def ledger_set_aside() -> Iterator[None]:
    """Let the computation inside neither be noted nor replayed."""
    global _ledger
    before, _ledger = _ledger, None
    try:
        yield
    finally:
        _ledger = before


def install() -> None:
    """Let attention go through here; counted, so that each ``uninstall`` undoes one."""
    global _installed
    _installed += 1
    functional.scaled_dot_product_attention = _attention


def uninstall() -> None:
    """Undo one ``install``."""
    global _installed
    _installed -= 1
    if _installed == 0:
        functional.scaled_dot_product_attention = _plain_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    is_plain = attn_mask is None and dropout_p == 0.0 and not is_causal and not enable_gqa
    kind = query.device.type
    if _is_keeping and is_plain and torch.is_autocast_enabled(kind):  # as PyTorch does for its own
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
    if not (_is_keeping and is_plain and _is_worth_keeping(query, key, value)):
        return _plain_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    result, _ = operator(query, key, value, scale)
    return result.transpose(1, 2)


def _is_worth_keeping(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether a sequence is long, and such as the kernels take; PyTorch's own function takes everything."""
    if query.ndim != 4 or key.shape[-2] < MIN_KEYS or key.shape != value.shape or not query.dtype == key.dtype == value.dtype:
        return False
    fits = query.shape[:2] == key.shape[:2] and query.shape[-1] == key.shape[-1]
    fits = fits and all(each.stride(-1) == 1 for each in (query, key, value))  # else numbers are read beside each other
    is_on_host = query.device.type == "cpu"
    return fits and (is_on_host or (query.shape[-1] % 8 == 0 and query.dtype.itemsize <= 4))


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute, note or replay attention.

    Return it as (batch, tokens, heads, width), and the log of the softmax's sums, (batch, heads, tokens).
    """
    if _ledger is not None and _ledger.is_replaying:
        return _ledger.results.pop(0)
    result, sums = _forward(query, key, value, scale)
    result = result.transpose(1, 2).contiguous()
    sums = sums.reshape(query.shape[:3]).contiguous()
    if _ledger is not None:
        # Compiled code takes what it is given for its own and writes over it after its last use, so it gets another copy.
        _ledger.results.append((result.clone(), sums.clone()))
    return result, sums


_attention_op = torch.library.custom_op("wandistiller::attention", attend, mutates_args=())


@_attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), query.new_empty(batch, heads, tokens, dtype=torch.float32)


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _backward(gradient.transpose(1, 2), query, key, value, result.transpose(1, 2), sums, scale)
    for_query, for_key, for_value = (item.contiguous() for item in gradients)
    return for_query, for_key, for_value


_attention_backward_op = torch.library.custom_op("wandistiller::attention_backward", attend_backward, mutates_args=())


@_attention_backward_op.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    query, key, value, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, result, sums = ctx.saved_tensors
    found = torch.ops.wandistiller.attention_backward(gradient, query, key, value, result, sums, ctx.scale)
    return (*found, None)


_attention_op.register_autograd(_differentiate, setup_context=_setup)

operator: Callable[..., _Pair] = torch.ops.wandistiller.attention
"""What computes; replaced while a step is written down (see ``tracing``)."""


def _kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> SDPBackend:
    """Return the fastest kernel that takes these and keeps its sums."""
    if query.device.type == "cpu":
        return SDPBackend.FLASH_ATTENTION
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, False)
    # From Hopper on, cuDNN's kernel uses the tensor cores better than the others.
    if torch.cuda.get_device_capability(query.device) >= (9, 0) and torch.backends.cuda.can_use_cudnn_attention(params):
        return SDPBackend.CUDNN_ATTENTION
    if torch.backends.cuda.can_use_flash_attention(params):
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.EFFICIENT_ATTENTION


def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> _Pair:
    aten, kernel = torch.ops.aten, _kernel(query, key, value, scale)
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, scale=scale)
    if kernel is SDPBackend.CUDNN_ATTENTION:
        return aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, False, False, scale=scale)[:2]
    if kernel is SDPBackend.FLASH_ATTENTION:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False, scale=scale)[:2]
    result, sums = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, False, scale=scale)[:2]
    return result, sums[..., : query.shape[-2]]  # its sums are padded to whole tiles


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    aten, kernel = torch.ops.aten, _kernel(query, key, value, scale)
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, result, sums, 0.0, False, scale=scale
        )
    # Without dropout the state of the random numbers is not looked at.
    seed = offset = torch.zeros((), dtype=torch.int64, device=query.device)
    lengths = (query.shape[-2], key.shape[-2])
    tensors = (gradient, query, key, value, result)
    if kernel is SDPBackend.CUDNN_ATTENTION:
        return aten._scaled_dot_product_cudnn_attention_backward(
            gradient,
            query,
            key,
            value,
            result,
            sums[..., None],
            seed,
            offset,
            None,
            None,
            None,
            *lengths,
            0.0,
            False,
            scale=scale,
        )
    if kernel is SDPBackend.FLASH_ATTENTION:
        return aten._scaled_dot_product_flash_attention_backward(
            *tensors, sums, None, None, *lengths, 0.0, False, seed, offset, scale=scale
        )
    padding = -sums.shape[-1] % 32
    padded = functional.pad(sums, (0, padding), value=float("inf")) if padding else sums
    needed = [True, True, True, False]
    return aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, None, result, padded, seed, offset, 0.0, needed, False, scale=scale
    )[:3]
