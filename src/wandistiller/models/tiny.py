"""The pipeline in the box: a complete Wan small enough for any machine, with random weights.

It has every part that a released Wan has (transformer, VAE, UMT5 text encoder, tokenizer, scheduler), so whatever runs on
it runs on the real one. It is written to the user's cache the first time and is the same on every machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from wandistiller.files import complete_or_absent
from wandistiller.models.sizes import Size, find_size

_SEED = 20250225
_VERSION = 1


def tiny_pipeline_folder() -> Path:
    """Return the folder of the tiny pipeline, made now if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "wandistiller" / f"tiny-{_VERSION}"
    if not (folder / "model_index.json").is_file():
        with complete_or_absent(folder) as partial:
            write_random_pipeline(partial, find_size("tiny"))
    return folder


def write_random_pipeline(folder: Path, size: Size, *, seed: int = _SEED, solver: str = "unipc") -> None:
    """Write a pipeline of a named size with random weights, as ``WanPipeline.save_pretrained`` would."""
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = _byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=size.transformer["text_dim"],
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                is_encoder_decoder=False,
                use_cache=False,
            )
        )
        experts = [WanTransformer3DModel(**size.transformer) for _ in range(2 if size.boundary else 1)]
        vae = AutoencoderKLWan(**size.vae)
    if solver == "euler":
        scheduler = FlowMatchEulerDiscreteScheduler(shift=size.shift)
    else:
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=size.shift
        )
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        transformer=experts[0],
        transformer_2=experts[1] if size.boundary else None,
        vae=vae,
        scheduler=scheduler,
        boundary_ratio=size.boundary,
        expand_timesteps=size.expand_timesteps,
    ).save_pretrained(folder)


def _byte_tokenizer():  # type: ignore[no-untyped-def]  # transformers is imported only when this is needed
    """Return a tokenizer with one token a byte: no vocabulary to ship, any language."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
