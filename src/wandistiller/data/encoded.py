"""A data set whose caches are complete: what training reads from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wandistiller.data.buckets import Bucket
from wandistiller.data.encode import fill_caches
from wandistiller.data.encode_job import EncodeJob
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.sources import Source, nothing_left
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


def encode_data(job: EncodeJob) -> EncodedData:
    """Fill the caches where they are not up to date, and give them out; what cannot be read is left out.

    Raises ``UsageError`` if that was everything.
    """
    encoded = fill_caches(job)
    names = {item.name for item in encoded.unreadable}
    buckets = [None if job.source.name(index) in names else bucket for index, bucket in enumerate(job.buckets)]
    if not any(buckets):
        raise nothing_left(str(job.config.dataset_path), encoded.skipped)
    return EncodedData(job.source, buckets, job.texts, job.latents, job.vae)
