"""Gradient checkpointing of the Wan VAE, for single frames and for clips.

The VAE walks through a clip in chunks and hands the last frames of every convolution on to the next chunk through a list
that its layers change in place. A layer that is run again in backward would therefore see the cache as a *later* chunk left
it. Here each layer is recomputed from the cache entries that it saw, which become inputs and outputs of the checkpoint, so
gradients also flow from one chunk to the one before, as they do without checkpointing.

A layer is switched by giving it another class, so that copies of a checkpointed VAE are checkpointed VAEs of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AutoencoderKLWan,
    WanAttentionBlock,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Checkpointed(nn.Module):
    """Runs the ``forward`` of the class behind it under checkpointing."""

    def forward(self, x: Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None) -> Tensor:
        plain = super().forward
        if not torch.is_grad_enabled():
            return plain(x) if feat_cache is None else plain(x, feat_cache=feat_cache, feat_idx=feat_idx)
        # Seeing to it that the same random numbers are drawn again takes the host time, and Wan's own VAEs draw none.
        dropout = getattr(self, "dropout", None)
        how = {"use_reentrant": False, "preserve_rng_state": dropout is not None and dropout.p > 0}
        if feat_cache is None or feat_idx is None:
            return checkpoint(plain, x, **how)
        start = feat_idx[0]
        out, entries = checkpoint(_with_own_cache, plain, x, *feat_cache[start:], **how)
        feat_cache[start : start + len(entries)] = entries
        feat_idx[0] = start + len(entries)
        return out


class _CheckpointedResidualBlock(_Checkpointed, WanResidualBlock):
    pass


class _CheckpointedResample(_Checkpointed, WanResample):
    pass


class _CheckpointedAttentionBlock(_Checkpointed, WanAttentionBlock):
    pass


class _CheckpointedNorm(_Checkpointed, WanRMS_norm):
    pass


_CHECKPOINTED: dict[type[nn.Module], type[nn.Module]] = {
    WanResidualBlock: _CheckpointedResidualBlock,
    WanResample: _CheckpointedResample,
    WanAttentionBlock: _CheckpointedAttentionBlock,
    WanRMS_norm: _CheckpointedNorm,
}
_PLAIN = {checkpointed: plain for plain, checkpointed in _CHECKPOINTED.items()}


def checkpoint_vae(vae: AutoencoderKLWan) -> None:
    """Recompute the inside of every layer in backward instead of keeping it; ``uncheckpoint_vae`` undoes it."""
    for layer in _layers(vae):
        layer.__class__ = _CHECKPOINTED.get(type(layer), type(layer))


def uncheckpoint_vae(vae: AutoencoderKLWan) -> None:
    """Keep everything for backward again."""
    for layer in _layers(vae):
        layer.__class__ = _PLAIN.get(type(layer), type(layer))


def _layers(vae: AutoencoderKLWan) -> list[nn.Module]:
    layers = [module for module in vae.modules() if isinstance(module, (WanResidualBlock, WanResample, WanAttentionBlock))]
    # The norms before the last convolutions work at full width and, in the decoder, at full resolution.
    return [*layers, vae.encoder.norm_out, vae.decoder.norm_out]


def _with_own_cache(forward: Callable[..., Tensor], x: Tensor, *entries: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Run a layer on a cache that begins at its own entries; return its output and the entries that it has used."""
    cache, used = list(entries), [0]
    out = forward(x, feat_cache=cache, feat_idx=used)
    return out, tuple(cache[: used[0]])
