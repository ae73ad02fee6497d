"""Text embeddings: from prompts through the pipeline's own encoder, or from a file.

What the encoder gives is used as diffusers uses it: padded with zeros to 512 tokens. The encoder is gone when the
function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from wandistiller.errors import CheckpointError, UsageError, shortened
from wandistiller.models.weight_files import SafetensorsWeights

MAX_TEXT_TOKENS = 512
# Few different lengths, for kernels that are chosen or compiled for each.
_LENGTHS = 32
_EMBEDDING_KEYS = ("embeddings", "prompt_embeds", "context")


EncodeTexts = Callable[[Sequence[str]], Tensor]
"""Turns texts into embeddings (texts, 512, width) on the host."""


@contextmanager
def open_text_encoder(
    text_encoder: Path,
    tokenizer: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    place: Callable[[nn.Module], object] | None = None,
) -> Iterator[EncodeTexts]:
    """Load a text encoder for as long as the block runs; ``place`` puts it elsewhere than on ``device``."""
    from diffusers import WanPipeline
    from transformers import UMT5EncoderModel

    words = _load_tokenizer(tokenizer)
    encoder = load_whole(UMT5EncoderModel, text_encoder, dtype)
    if place is None:
        encoder.to(device)
    else:
        place(encoder)
    pipeline = WanPipeline(tokenizer=words, text_encoder=encoder, vae=None, scheduler=None)

    def encode(texts: Sequence[str]) -> Tensor:
        # The encoder sees nothing of the padding, and what comes out for it is replaced by zeros; to compute 512 tokens for
        # the twenty of a usual prompt would take many times as long.
        longest = max(_count_tokens(words, texts))
        length = min(-(-longest // _LENGTHS) * _LENGTHS, MAX_TEXT_TOKENS)
        with torch.no_grad():
            embeddings: Tensor = pipeline.encode_prompt(
                list(texts), do_classifier_free_guidance=False, max_sequence_length=length, device=torch.device(device)
            )[0]
        return torch.nn.functional.pad(embeddings.cpu(), (0, 0, 0, MAX_TEXT_TOKENS - length))

    yield encode


def count_tokens(tokenizer: Path, texts: Sequence[str]) -> list[int]:
    """Return how many of the 512 tokens each text takes, without its padding; no weights are needed for that."""
    return _count_tokens(_load_tokenizer(tokenizer), texts)


def _count_tokens(words: Any, texts: Sequence[str]) -> list[int]:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    found = words([prompt_clean(text) for text in texts], max_length=MAX_TEXT_TOKENS, truncation=True, add_special_tokens=True)
    return [len(tokens) for tokens in found.input_ids]


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"The tokenizer {folder} cannot be loaded.", why=str(error).strip(), fix="Download the folder again."
        ) from error


def encode_prompts(
    text_encoder: Path,
    tokenizer: Path,
    prompts: Sequence[str],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    place: Callable[[nn.Module], object] | None = None,
) -> Tensor:
    """Return the embeddings (prompts, 512, width) on the host, one prompt at a time: none depends on the others."""
    with open_text_encoder(text_encoder, tokenizer, device=device, dtype=dtype, place=place) as encode:
        return torch.cat([encode([prompt]) for prompt in prompts])


def load_whole(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Load a transformers model, or raise ``CheckpointError``: the library itself fills what is missing with random numbers."""
    try:
        model, found = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{folder} cannot be loaded.", why=reason[0] if reason else type(error).__name__, fix="Download the folder again."
        ) from error
    wrong = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    if wrong:
        raise CheckpointError(
            f"{folder} lacks {len(wrong)} tensors or has them in another shape: {shortened(map(str, wrong))}.",
            fix="Download the folder again.",
        )
    return model.eval()


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
    return pad_embeddings(weights.read(key), width, path, key)


def pad_embeddings(stored: Tensor, width: int, path: Path, key: str) -> Tensor:
    """Return stored embeddings as (prompts, 512, ``width``); raise ``CheckpointError`` for those of another model."""
    shape = stored.shape
    if len(shape) not in (2, 3) or shape[-1] != width or shape[-2] > MAX_TEXT_TOKENS or 0 in shape:
        raise CheckpointError(
            f"{path}: '{key}' has shape {list(shape)}.",
            why=f"this model takes up to {MAX_TEXT_TOKENS} tokens of width {width}.",
            fix="Encode the prompt with the text encoder that belongs to the model.",
        )
    embeddings = stored.to(torch.float32).reshape(-1, shape[-2], width)
    return torch.nn.functional.pad(embeddings, (0, 0, 0, MAX_TEXT_TOKENS - shape[-2]))
