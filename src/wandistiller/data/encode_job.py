"""What an encoding has to do: media, captions, models and caches, found and checked before anything is loaded."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wandistiller.config.encode import EncodeConfig
from wandistiller.data.buckets import Bucket, make_buckets
from wandistiller.data.cache_files import fingerprint_model
from wandistiller.data.cache_use import Making, using_cache
from wandistiller.data.claims import CLAIM_SECONDS, Claims
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.media_files import BadItem
from wandistiller.data.sources import Source, assign_buckets, is_world, nothing_left, open_source, refuse
from wandistiller.data.text_cache import TextCache, fingerprint_text_encoder
from wandistiller.distributed.ranks import rank_device, read_ranks
from wandistiller.files import expand_home
from wandistiller.models.devices import find_device, find_dtype
from wandistiller.models.pipeline import Pipeline, find_pipeline
from wandistiller.models.sizes import usual_size
from wandistiller.models.stored import VAE, StoredModel, inspect_checkpoint

PATCH = 2
"""Every released Wan cuts latents into patches of 2 x 2."""
_PIXELS_TOGETHER = 832 * 480


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """An encoding that has been checked: everything found, nothing loaded."""

    config: EncodeConfig
    device: torch.device
    dtype: torch.dtype
    vae_dtype: torch.dtype
    pipeline: Pipeline
    vae: StoredModel
    source: Source
    buckets: Sequence[Bucket | None]
    bad: Sequence[BadItem]
    texts: TextCache
    latents: LatentCache
    claims: Claims
    making: Making
    """What the caches are made with."""

    @property
    def num_texts(self) -> int:
        """Captions, and the empty one."""
        return len(self.source) + 1

    @property
    def num_media(self) -> int:
        return sum(bucket is not None for bucket in self.buckets)

    def using_caches(self) -> AbstractContextManager[None]:
        """Keep jobs of other sizes or models out of the caches for as long as this one fills or reads them."""
        return using_cache(self.latents.folder, self.making)

    def batch_size(self, bucket: Bucket) -> int:
        fitting = _PIXELS_TOGETHER // (bucket.frames * bucket.height * bucket.width)
        return self.config.batch_size or max(1, fitting)


def default_cache_dir(dataset_path: str) -> Path:
    """Return where caches are unless the user says otherwise: ``.cache`` in the data set's folder.

    A list file has a folder of its own in there, because other lists may name the same media with other captions.
    """
    place = expand_home(dataset_path)
    if is_world(dataset_path):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "wandistiller" / "data" / re.sub(r"[^\w.-]", "-", dataset_path)
    return place / ".cache" if place.is_dir() else place.parent / ".cache" / f".{place.name}"


def plan_buckets(
    vae_config: Mapping[str, Any],
    width: int | None,
    height: int | None,
    frames: Sequence[int],
    max_aspect: float,
    patch: int = PATCH,
) -> list[Bucket]:
    """Return the buckets for a VAE; what is not given is what models with such a VAE are usually sampled at.

    ``patch`` is what each side of the latents is a multiple of: 1 where no transformer cuts them.
    """
    usual = usual_size(vae_config)
    return make_buckets(
        width or usual.width,
        height or usual.height,
        frame_counts=frames or (usual.frames,),
        multiple=vae_config["scale_factor_spatial"] * patch,
        temporal=vae_config["scale_factor_temporal"],
        max_aspect=max_aspect,
    )


def prepare_encoding(config: EncodeConfig, flag: str = "--dataset-path", patch: int = PATCH) -> EncodeJob:
    """Find and check every part without loading any.

    ``flag`` is what the user gave the data set with, ``patch`` what each side of the latents is a multiple of.
    """
    config.check()
    assert config.model is not None and config.dataset_path is not None  # check() has made sure
    device = find_device(rank_device(config.device, read_ranks()))
    dtype = find_dtype(config.dtype, device)
    vae_dtype = dtype if config.vae_dtype == "auto" else find_dtype(config.vae_dtype, device)
    parts = {"text_encoder", "tokenizer", *(() if config.vae_checkpoint else ("vae",))}
    pipeline = find_pipeline(config.model, parts)
    vae = inspect_checkpoint(config.vae_checkpoint or pipeline.part("vae"), VAE)
    vae_fingerprint = fingerprint_model(vae)
    encoder = fingerprint_text_encoder(pipeline.part("text_encoder"), pipeline.part("tokenizer"))
    buckets = plan_buckets(vae.config, config.width, config.height, config.frames, config.max_aspect, patch)
    folder = config.cache_dir or default_cache_dir(config.dataset_path)
    text_dtype, latent_dtype = (None if name == "auto" else name for name in (config.dtype, config.vae_dtype))
    opened = open_source(config.dataset_path, skip_bad=config.skip_bad, flag=flag)
    assigned = assign_buckets(opened.source, buckets)
    if len(assigned.bad) == len(opened.source):
        raise nothing_left(config.dataset_path, [*opened.bad, *assigned.bad])
    if assigned.bad and not config.skip_bad:
        raise refuse(config.dataset_path, len(opened.source), assigned.bad)
    if read_ranks().is_first:
        sweep_partial(folder)
    return EncodeJob(
        config=config,
        device=device,
        dtype=dtype,
        vae_dtype=vae_dtype,
        pipeline=pipeline,
        vae=vae,
        source=opened.source,
        buckets=assigned.buckets,
        bad=[*opened.bad, *assigned.bad],
        texts=TextCache(folder, encoder=encoder, dtype=text_dtype),
        latents=LatentCache(folder, vae=vae_fingerprint, dtype=latent_dtype),
        claims=Claims(folder / ".claims"),
        making={
            "sizes": " ".join(map(str, buckets)),
            "weights of the VAE": vae_fingerprint,
            "weights of the text encoder": encoder,
            "precision of latents": latent_dtype,
            "precision of captions": text_dtype,
        },
    )


def sweep_partial(folder: Path) -> None:
    """Remove what processes that were killed have left half-written."""
    for partial in folder.rglob(".*.partial-*.safetensors"):
        try:
            if time.time() - partial.stat().st_mtime > CLAIM_SECONDS:
                partial.unlink(missing_ok=True)
        except FileNotFoundError:  # its writer has just finished
            continue
