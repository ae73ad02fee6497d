"""Pipelines with random weights: every part that a released Wan has, in any named size.

The tiny one is small enough for any machine (transformer, VAE, UMT5 text encoder, tokenizer, scheduler), so whatever runs on
it runs on the real one. It is written to the user's cache the first time and is the same on every machine. It draws noise;
the one that has learnt something is in ``box``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wandistiller.files import complete_or_absent
from wandistiller.models.sizes import Size, find_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

SEED = 20250225
_VERSION = 2


def random_tiny_folder() -> Path:
    """Return the folder of the tiny pipeline with random weights, made now if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "wandistiller" / f"tiny-random-{_VERSION}"
    if not (folder / "model_index.json").is_file():
        with complete_or_absent(folder) as partial:
            write_random_pipeline(partial, find_size("tiny"))
    return folder


def write_random_pipeline(folder: Path, size: Size, *, seed: int = SEED, solver: str = "unipc") -> None:
    """Write a pipeline of a named size with random weights, as ``WanPipeline.save_pretrained`` would."""
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )

    tokenizer = _word_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = _neighbour_encoder(len(tokenizer), size.transformer["text_dim"])
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


# What captions of the procedural world are written with.
_WORDS = (
    "a at the and on background , moves small large red green blue yellow purple cyan black grey white brown circle square "
    "triangle top bottom left right centre up down"
).split()


def _word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each of a few words and for each byte of all others: any text, little to ship."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Of all ways to cut a text the one with the largest sum of scores is taken: words before the bytes that they consist of.
    words = [space + word for word in _WORDS for space in ("", "\u0120") if space + word not in alphabet]
    scores = [(token, 0.0) for token in special] + [(byte, -10.0) for byte in alphabet] + [(word, -1.0) for word in words]
    tokenizer = Tokenizer(Unigram(scores, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


# Tokens before and after that each head of the text encoder looks at; with the token itself, an eighth of the width each.
_NEIGHBOURS = (-3, -2, -1, 1, 2, 3, 4)


def _neighbour_encoder(vocabulary: int, width: int) -> UMT5EncoderModel:
    """Return a UMT5 made by hand, which needs no training: each token becomes its own code beside those of its neighbours.

    So "circle" in "a small red circle at the top left" says which circle and where. Codes are random.
    """
    from transformers import UMT5Config, UMT5EncoderModel

    code = width // (len(_NEIGHBOURS) + 1)
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=code,
        d_ff=8,
        num_layers=1,
        num_heads=len(_NEIGHBOURS),
        is_encoder_decoder=False,
        use_cache=False,
        dropout_rate=0.0,
    )
    model = UMT5EncoderModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        codes = model.get_input_embeddings().weight
        codes[:, :code].normal_()
        layer = model.encoder.block[0].layer[0]
        attention = layer.SelfAttention
        for norm in (layer.layer_norm, model.encoder.block[0].layer[1].layer_norm, model.encoder.final_layer_norm):
            norm.weight.fill_(1.0)
        buckets = attention._relative_position_bucket(torch.tensor(_NEIGHBOURS))
        for head, bucket in enumerate(buckets.tolist()):
            # Scores are this bias alone, so nearly all the attention goes to the neighbour.
            attention.relative_attention_bias.weight[bucket, head] = 20.0
            rows = slice(head * code, (head + 1) * code)
            attention.v.weight[rows, :code] = torch.eye(code)
            attention.o.weight[(head + 1) * code : (head + 2) * code, rows] = torch.eye(code)
    return model
