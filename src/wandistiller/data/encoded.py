"""A data set whose caches are complete: what training reads from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wandistiller.config.encode import EncodeConfig
from wandistiller.data.buckets import Bucket
from wandistiller.data.encode import prepare_encoding
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.sources import Source
from wandistiller.data.text_cache import TextCache
from wandistiller.models.stored import StoredModel


@dataclass(frozen=True)
class EncodedData:
    """The items, their sizes, their caches, and the VAE that made the latents."""

    source: Source
    buckets: Sequence[Bucket | None]
    """One an item; None for what was left out."""
    texts: TextCache
    latents: LatentCache
    vae: StoredModel


def open_encoded(config: EncodeConfig) -> EncodedData:
    """Open the caches that ``encode`` has filled with the same configuration; what could not be read is left out."""
    job = prepare_encoding(config)
    buckets = list(job.buckets)
    for index, _ in job.latents.missing(job.source, buckets):  # --skip-bad went on without these
        buckets[index] = None
    return EncodedData(job.source, buckets, job.texts, job.latents, job.vae)
