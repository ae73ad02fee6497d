"""Training samples from the caches: latents, text, and what is random about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wandistiller.data.buckets import Bucket
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.source_samples import SourceSamples
from wandistiller.data.sources import Source
from wandistiller.data.text_cache import EMPTY_NAME, TextCache
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.models.text_padding import trim_padding
from wandistiller.terminal import progress
from wandistiller.units import Bytes

_FEW_SAMPLES = 256
# Reading at first holds everything twice, and captions differ in length.
_SAFETY = 0.4


@dataclass(frozen=True, kw_only=True)
class Randomness:
    """What is drawn for each sample."""

    sigma: SigmaDistribution
    caption_dropout: float = 0.0


class CachedSamples(SourceSamples):
    """Reads samples by number; what fits the budget stays in memory after the first time.

    Thousands of small files cost more to open than to train on: ``preload`` reads a set that fits before workers start, so
    that they share one copy.
    """

    def __init__(
        self,
        source: Source,
        buckets: Sequence[Bucket | None],
        texts: TextCache,
        latents: LatentCache,
        *,
        text_width: int,
        randomness: Randomness,
        memory: Bytes,
        trims_text: bool = False,
    ) -> None:
        """``buckets`` has one entry an item of the source; those without a bucket are left out.

        ``trims_text`` leaves the padding of captions away (see ``models.text_padding``).
        """
        super().__init__(source, buckets)
        self._texts = texts
        self._latents = latents
        self._text_width = text_width
        self._randomness = randomness
        self._budget = self._room = int(memory)
        self._kept: dict[tuple[str, int], Tensor] = {}
        self.trims_text = trims_text
        self.empty_text = self._read_text(EMPTY_NAME, "")

    def preload(self) -> None:
        """Read everything, if it fits the budget by the size of the first samples; else read it as it is asked for."""
        some = range(0, len(self), max(len(self) // 16, 1))
        per_sample = sum(self.latents(index).nbytes + self.text(index).nbytes for index in some) / len(some)
        if len(self) < _FEW_SAMPLES or per_sample * len(self) > _SAFETY * self._budget:
            return
        with progress("Reading caches", len(self), "sample") as advance:
            for index in range(len(self)):
                self.latents(index)
                self.text(index)
                advance()
        # In one piece of shared memory: a piece for each would be too many for the system.
        together = torch.cat([value.reshape(-1) for value in self._kept.values()]).share_memory_()
        pieces = together.split([value.numel() for value in self._kept.values()])
        shapes = [value.shape for value in self._kept.values()]
        self._kept = {key: piece.view(shape) for key, piece, shape in zip(self._kept, pieces, shapes, strict=True)}

    def latents(self, index: int) -> Tensor:
        """Return a sample's latents (channels, frames, height, width), normalised."""
        return self._remembered("latents", index, lambda: self._latents.read(self.name(index), self.buckets[index]))

    def latent_shape(self, index: int) -> tuple[int, int, int, int]:
        """Return the shape of a sample's latents."""
        channels, frames, height, width = self.latents(index).shape
        return channels, frames, height, width

    def text(self, index: int) -> Tensor:
        """Return a caption's embeddings (512, width), or fewer without their padding; whoever edits it now changes nothing."""
        return self._remembered("text", index, lambda: self._read_text(self.name(index)))

    def fingerprint(self, index: int) -> str:
        """Return another string for other media, another caption, or other encoders; only headers are read for it."""
        name = self.name(index)
        return f"{name} {self._latents.origin(name)} {self._texts.origin(name)}"

    def read(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        latents = self.latents(index)
        # In float64 so that sigmas are the quantile function's own to rounding.
        place, drop = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        text = self.empty_text if drop < self._randomness.caption_dropout else self.text(index)
        return {
            "latents": latents,
            "text": text,
            "place": torch.tensor(place, dtype=torch.float64),
            "sigma": torch.tensor(self._randomness.sigma.quantile(place), dtype=torch.float32),
            "noise": torch.randn(latents.shape, generator=generator),
        }

    def _read_text(self, name: str, caption: str | None = None) -> Tensor:
        text = self._texts.read(name, self._text_width, caption)
        return trim_padding(text).contiguous() if self.trims_text else text

    def _remembered(self, kind: str, index: int, read: Callable[[], Tensor]) -> Tensor:
        key = (kind, index)
        if key in self._kept:
            return self._kept[key]
        value = read()
        if value.nbytes <= self._room:
            self._room -= value.nbytes
            self._kept[key] = value
        return value
