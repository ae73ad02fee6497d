"""The data of a transformer's training: encoded with the run's own settings, then read from the caches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wandistiller.config.encode import EncodeConfig
from wandistiller.config.transformer_training import TransformerTrainingConfig
from wandistiller.data.cached_samples import CachedSamples, Randomness
from wandistiller.data.encode_job import PATCH, EncodeJob, prepare_encoding
from wandistiller.data.encoded import EncodedData
from wandistiller.data.media_files import HELD_OUT_FOLDER
from wandistiller.memory.host_limits import available_host_memory
from wandistiller.models.latents import latent_shape, num_tokens
from wandistiller.models.text_padding import can_fold_padding
from wandistiller.units import Bytes


def prepare_data(
    config: TransformerTrainingConfig,
    model: str,
    dataset: str,
    cache_dir: Path | None,
    device: torch.device,
    flag: str = "--dataset-path",
    patch: int = PATCH,
) -> EncodeJob:
    """Look at everything that a data set's caches need; nothing is loaded or written.

    ``patch`` is what each side of the latents is a multiple of.
    """
    settings = EncodeConfig(
        model=model,
        dataset_path=dataset,
        cache_dir=cache_dir,
        vae_checkpoint=config.vae_checkpoint,
        width=config.width,
        height=config.height,
        frames=config.frames,
        max_aspect=config.max_aspect,
        device=str(device),
        dtype=config.dtype,
        vae_dtype=config.vae_dtype,
        vae_tiling=config.vae_tiling,
        skip_bad=config.skip_bad,
    )
    return prepare_encoding(settings, flag, patch)


def prepare_held_out(
    config: TransformerTrainingConfig, model: str, device: torch.device, patch: int = PATCH
) -> EncodeJob | None:
    """Look at the held-out data, where there are any; nothing is loaded or written."""
    if config.held_out is None:
        return None
    # In a folder of its own, as names may be the same as those of the training data; hidden, as no name begins with a dot.
    cache_dir = config.cache_dir / HELD_OUT_FOLDER if config.cache_dir else None
    return prepare_data(config, model, config.held_out, cache_dir, device, "--held-out", patch)


def folds_padding(transformer: Mapping[str, Any], data: EncodedData) -> bool:
    """Say whether captions go without their padding: not where samples are as long as videos."""
    buckets = {bucket for bucket in data.buckets if bucket is not None}
    shapes = [latent_shape(data.vae.config, (bucket.frames, bucket.height, bucket.width)) for bucket in buckets]
    return can_fold_padding(transformer, max(num_tokens(transformer, shape) for shape in shapes))


def open_samples(
    data: EncodedData, randomness: Randomness, transformer: Mapping[str, Any], *, workers: int, trims_text: bool
) -> CachedSamples:
    """Return what is in the caches as samples, with a quarter of the free memory for each process that reads."""
    return CachedSamples(
        data.source,
        data.buckets,
        data.texts,
        data.latents,
        text_width=transformer["text_dim"],
        randomness=randomness,
        memory=Bytes(available_host_memory() // (4 * (workers + 1))),
        trims_text=trims_text,
    )
