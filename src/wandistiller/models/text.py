"""Text embeddings: from prompts through the pipeline's own encoder, or from a file.

What the encoder gives is used as diffusers uses it: padded with zeros to 512 tokens. The encoder is gone when the
function returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.errors import CheckpointError, UsageError, shortened
from wandistiller.models.weight_files import SafetensorsWeights

MAX_TEXT_TOKENS = 512
_EMBEDDING_KEYS = ("embeddings", "prompt_embeds", "context")


@torch.no_grad()
def encode_prompts(
    text_encoder: Path, tokenizer: Path, prompts: Sequence[str], *, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Return the embeddings (prompts, 512, width) on the host."""
    from diffusers import WanPipeline
    from transformers import AutoTokenizer, UMT5EncoderModel

    try:
        words = AutoTokenizer.from_pretrained(tokenizer)
        encoder = UMT5EncoderModel.from_pretrained(text_encoder, dtype=dtype).eval().to(device)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The text encoder of {text_encoder.parent} cannot be loaded.",
            why=str(error).strip().splitlines()[0],
            fix="Download its text_encoder and tokenizer folders again.",
        ) from error
    pipeline = WanPipeline(tokenizer=words, text_encoder=encoder, vae=None, scheduler=None)
    embeddings = [
        pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=MAX_TEXT_TOKENS, device=torch.device(device)
        )[0].cpu()
        for prompt in prompts
    ]
    return torch.cat(embeddings)


def read_embeddings(path: Path, width: int) -> Tensor:
    """Return embeddings (prompts, 512, ``width``) from a safetensors file of them, padded as the encoder's are."""
    if not path.is_file():
        raise UsageError(f"{path} does not exist.", fix="Check the path; embeddings are a .safetensors file.")
    weights = SafetensorsWeights(path, [path])
    key = next((key for key in _EMBEDDING_KEYS if key in weights.entries), None)
    if key is None and len(weights.entries) == 1:
        key = next(iter(weights.entries))
    if key is None:
        raise CheckpointError(
            f"{path} does not say which tensor is the embedding.",
            why=f"it holds {shortened(weights.entries) or 'nothing'}.",
            fix="Name the tensor 'embeddings'.",
        )
    shape = weights.entries[key].shape
    if len(shape) not in (2, 3) or shape[-1] != width or shape[-2] > MAX_TEXT_TOKENS or 0 in shape:
        raise CheckpointError(
            f"{path}: '{key}' has shape {list(shape)}.",
            why=f"this model takes up to {MAX_TEXT_TOKENS} tokens of width {width}.",
            fix="Encode the prompt with the text encoder that belongs to the model.",
        )
    embeddings = weights.read(key).to(torch.float32).reshape(-1, shape[-2], width)
    return torch.nn.functional.pad(embeddings, (0, 0, 0, MAX_TEXT_TOKENS - shape[-2]))
