"""Captions without their padding, for models that still see all of it.

Wan takes a caption padded with zeros to 512 tokens and does not mask the padding, so it is part of what the model sees. All of
it is one token again and again, though, and n equal keys weigh in attention as much as one of them whose score is raised by
log(n). So the padding can be left away but for one token without changing the result. For pictures and short clips that
saves most of the work of cross-attention; at video length it saves little, and attention with raised scores is slower.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

TEXT_TOKENS = 512
MOST_TOKENS = 4096
"""From more tokens of picture on, the faster kernels without raised scores are worth more than what is saved."""

# Few different lengths, so that compiled code is compiled for few.
_LENGTHS = 16


class FoldedPaddingProcessor(WanAttnProcessor):
    """Cross-attention in which the last token of a text below 512 counts for all that was left away."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        if encoder_hidden_states is not None and attention_mask is None and encoder_hidden_states.shape[1] < TEXT_TOKENS:
            length = encoder_hidden_states.shape[1]
            attention_mask = hidden_states.new_zeros(1, 1, 1, length)
            attention_mask[..., -1] = math.log(TEXT_TOKENS - length + 1)
        result: Tensor = super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        return result


def fold_padding(model: nn.Module) -> None:
    """Let a Wan transformer take texts of any length up to 512 as if they were padded to 512 with zeros."""
    for block in model.get_submodule("blocks").children():
        attention: Any = block.get_submodule("attn2")
        assert attention.add_k_proj is None, "models that also look at a picture count on 512 tokens"
        attention.set_processor(FoldedPaddingProcessor())


def can_fold_padding(config: Any, num_tokens: int) -> bool:
    """Say whether padding is worth folding for a transformer of this configuration and samples of so many tokens."""
    return config.get("added_kv_proj_dim") is None and num_tokens <= MOST_TOKENS


def cut_text(text: Tensor, max_tokens: int) -> Tensor:
    """Let padding begin after ``max_tokens`` tokens of text (..., tokens, width) at the latest."""
    if text.shape[-2] <= max_tokens:
        return text
    is_kept = torch.arange(text.shape[-2], device=text.device) < max_tokens
    return text * is_kept[:, None]


def trim_padding(text: Tensor) -> Tensor:
    """Leave the padding away from text (..., 512, width), but for one token at least."""
    used = text.reshape(-1, *text.shape[-2:]).any(dim=-1).any(dim=0).nonzero()
    length = int(used[-1]) + 2 if len(used) else 1
    return text[..., : min(-(-length // _LENGTHS) * _LENGTHS, text.shape[-2]), :]
