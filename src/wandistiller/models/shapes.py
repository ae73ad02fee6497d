"""A pipeline by its configurations alone: of files that are here, or of a named size that nobody has downloaded."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wandistiller.errors import CheckpointError, UsageError, nearest
from wandistiller.models.pipeline import Pipeline, find_description, find_pipeline, is_downloaded
from wandistiller.models.sizes import HUB_IDS, SIZES, Size, usual_size
from wandistiller.models.stored import TRANSFORMER, VAE, complete_config, inspect_checkpoint

Config = Mapping[str, Any]
_UMT5_XXL: Config = {
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 256384,
    "feed_forward_proj": "gated-gelu",
    "model_type": "umt5",
}


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The parts of a pipeline, without their weights."""

    transformers: Sequence[Config]
    vae: Config
    text_encoder: Config | None
    size: Size
    """What such models are usually sampled with."""
    stored_dtype: torch.dtype | None = None
    """What most of the transformer's file holds; None where there is no file, as of a named size."""

    @classmethod
    def of(cls, vae: Config, *transformers: Config, stored_dtype: torch.dtype | None = None) -> Shapes:
        """Return the shapes of models at hand; the text encoder is of no concern."""
        return cls(transformers=transformers, vae=vae, text_encoder=None, size=usual_size(vae), stored_dtype=stored_dtype)

    def text_encoder_model(self) -> nn.Module | None:
        """Return the text encoder on the meta device."""
        return None if self.text_encoder is None else _text_encoder(json.dumps(dict(self.text_encoder)))


@functools.lru_cache(maxsize=1)
def _text_encoder(config: str) -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.device("meta"):
        found: nn.Module = UMT5EncoderModel(UMT5Config(**json.loads(config)))
    return found.requires_grad_(False)


def find_named(source: str) -> Size | None:
    """Return the size that is named, also by the hub id of its weights, as long as they are not here to be looked at."""
    sizes = {hub: name for name, hub in HUB_IDS.items()}
    if source in sizes and not Path(source).exists() and not is_downloaded(source):
        source = sizes[source]
    return SIZES[source] if source in SIZES and not Path(source).exists() and not source.startswith("tiny") else None


def find_shapes(source: str) -> Shapes:
    """Return the shapes of a named size or of a pipeline; of its files only the headers are read."""
    size = find_named(source)
    if size is not None:
        count = 1 if size.boundary is None else 2
        return Shapes(transformers=[size.transformer] * count, vae=size.vae, text_encoder=_UMT5_XXL, size=size)
    described = find_description(source)
    if described is not None:
        return _by_configurations(described)
    try:
        pipeline = find_pipeline(source, ("transformer", "transformer_2", "vae", "text_encoder"))
    except (CheckpointError, UsageError) as error:
        if nearest(source, SIZES) and "/" not in source:
            raise UsageError(
                f"There is no model and no size '{source}'{nearest(source, SIZES)}",
                fix=f"Give a folder, a hub id, or one of {', '.join(SIZES)}.",
            ) from error
        raise
    names = [name for name in ("transformer", "transformer_2") if name in pipeline.parts]
    transformers = [inspect_checkpoint(pipeline.part(name), TRANSFORMER) for name in names]
    vae = inspect_checkpoint(pipeline.part("vae"), VAE).config
    encoder = pipeline.parts.get("text_encoder")
    return Shapes(
        transformers=[each.config for each in transformers],
        vae=vae,
        text_encoder=read_config(encoder) if encoder is not None else None,
        size=usual_size(vae),
        stored_dtype=transformers[0].main_dtype() if transformers else None,
    )


def _by_configurations(pipeline: Pipeline) -> Shapes:
    """Return the shapes of a pipeline of which no weights are here."""
    experts = ["transformer", *(["transformer_2"] if "transformer_2" in pipeline.parts else [])]
    encoder, vae = pipeline.parts.get("text_encoder"), complete_config(VAE, read_config(pipeline.part("vae")))
    return Shapes(
        transformers=[complete_config(TRANSFORMER, read_config(pipeline.part(name))) for name in experts],
        vae=vae,
        text_encoder=read_config(encoder) if encoder is not None else None,
        size=usual_size(vae),
    )


def read_config(folder: Path) -> Config:
    """Return the configuration of a model in a folder."""
    found: Config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found
