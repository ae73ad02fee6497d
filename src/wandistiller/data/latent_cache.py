"""Latents on disk: one ``NAME.latent.safetensors`` an item, key ``latent``.

Each file says in its metadata whether its latents are normalised (those that we write are), which media, VAE and bucket they
come from, and so a stale one is found by its header. The media are hashed; as long as their size and time of change are those
that the cache remembers, the hash is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller.data.buckets import Bucket
from wandistiller.data.cache_files import CacheFile, Requirement, cache_path, refuse_incomplete
from wandistiller.data.sources import Source
from wandistiller.errors import CheckpointError
from wandistiller.models.latents import normalise
from wandistiller.models.weight_files import SafetensorsWeights


class LatentCache:
    """The latents of a data set's media."""

    def __init__(
        self, folder: Path, *, vae: str | None, dtype: str | None = None, vae_config: Mapping[str, Any] | None = None
    ) -> None:
        """``vae`` is what ``fingerprint_model`` gives; None for it or for ``dtype`` takes any.

        ``vae_config`` is needed only to read latents that somebody else has written without normalising them.
        """
        self.folder = folder
        self._vae = vae
        self._dtype = dtype
        self._vae_config = vae_config

    def file(self, name: str) -> CacheFile:
        """Return an item's file, whether or not it is there."""
        return CacheFile(cache_path(self.folder, name, ".latent.safetensors"), "latent")

    def problem(self, source: Source, index: int, bucket: Bucket) -> str | None:
        """Say why an item has to be encoded; None if it is up to date."""
        file = self.file(source.name(index))
        problem = file.problem(self._requirements(bucket))
        if problem is None and not self._is_of(file.metadata(), source, index):
            problem = f"{file.path} was made from other media than there are now"
        return problem

    def missing(self, source: Source, buckets: Sequence[Bucket | None]) -> Iterator[tuple[int, str]]:
        """Yield the items to encode and why; those without a bucket are not wanted."""
        for index, bucket in enumerate(buckets):
            problem = None if bucket is None else self.problem(source, index, bucket)
            if problem is not None:
                yield index, problem

    def check(self, source: Source, buckets: Sequence[Bucket | None]) -> None:
        """Raise ``CheckpointError`` with the names of the first files that are missing or stale."""
        problems = [problem for _, problem in self.missing(source, buckets)]
        refuse_incomplete(self.folder, len(source), "latents", problems)

    def read(self, name: str, bucket: Bucket | None = None) -> Tensor:
        """Return latents (channels, frames, height, width) in float32, normalised; None for ``bucket`` takes any.

        The media are not looked at here; ``check`` does that once for all.
        """
        file = self.file(name)
        stored, metadata = file.read(self._requirements(bucket))
        latents = stored.to(torch.float32)
        if latents.ndim != 4:
            raise CheckpointError(
                f"{file.path} has latents of shape {list(latents.shape)}.",
                why="(channels, frames, height, width) is expected.",
                fix="Remove the file, then encode again.",
            )
        match metadata.get("normalised"):
            case "true":
                return latents
            case "false" if self._vae_config is not None:
                return normalise(latents[None], self._vae_config)[0]
        raise CheckpointError(
            f"{file.path} does not say that its latents are normalised.",
            why="its metadata 'normalised' should be 'true'; 'false' needs the VAE's configuration.",
            fix="Remove the file, then encode again.",
        )

    def origin(self, name: str) -> str:
        """Return what tells latents apart from those of other media or another encoding, from the file's header alone."""
        return self.file(name).origin(("media", "vae", "vae_dtype", "tiled", "bucket"))

    def write(
        self,
        name: str,
        bucket: Bucket,
        latents: Tensor,
        *,
        stamp: str,
        media: str,
        vae_path: str,
        vae_dtype: torch.dtype,
        tiled: bool = False,
    ) -> None:
        """Write the normalised latents of one item.

        ``stamp`` and ``media`` are the source's stamp and fingerprint from before the media were read: if they change
        meanwhile, that is seen the next time.
        """
        metadata = {
            "normalised": "true",
            "bucket": str(bucket),
            "stamp": stamp,
            "media": media,
            "vae": self._vae or "",
            "vae_path": vae_path,
            "vae_dtype": str(vae_dtype).removeprefix("torch."),
            "tiled": str(tiled).lower(),
        }
        self.file(name).write(latents, metadata)

    def remember_stamp(self, source: Source, index: int) -> None:
        """Note a new time of change of media whose content is still the same, so that they are not hashed every time."""
        file = self.file(source.name(index))
        metadata, stamp = file.metadata(), source.stamp(index)
        if metadata.get("stamp") != stamp:
            file.write(SafetensorsWeights(file.path, [file.path]).read(file.key), {**metadata, "stamp": stamp})

    def _is_of(self, metadata: Mapping[str, str], source: Source, index: int) -> bool:
        return metadata.get("stamp") == source.stamp(index) or metadata.get("media") == source.fingerprint(index)

    def _requirements(self, bucket: Bucket | None) -> list[Requirement]:
        wanted = (
            ("vae", self._vae, "was made with another VAE"),
            ("bucket", None if bucket is None else str(bucket), f"is not of the size {bucket} (frames x height x width)"),
            ("vae_dtype", self._dtype, "was made in another precision"),
        )
        return [Requirement(field, value, otherwise) for field, value, otherwise in wanted if value is not None]
