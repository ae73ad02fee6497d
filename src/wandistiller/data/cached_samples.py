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
from wandistiller.units import Bytes


@dataclass(frozen=True, kw_only=True)
class Randomness:
    """What is drawn for each sample."""

    sigma: SigmaDistribution
    caption_dropout: float = 0.0


class CachedSamples(SourceSamples):
    """Reads samples by number; what fits the budget stays in memory after the first time."""

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
        self._room = int(memory)
        self._kept: dict[tuple[str, int], Tensor] = {}
        self.trims_text = trims_text
        self.empty_text = self._read_text(EMPTY_NAME, "")

    def latents(self, index: int) -> Tensor:
        """Return a sample's latents (channels, frames, height, width), normalised."""
        return self._remembered("latents", index, lambda: self._latents.read(self.name(index), self.buckets[index]))

    def text(self, index: int) -> Tensor:
        """Return a caption's embeddings (512, width), or fewer without their padding."""
        return self._remembered("text", index, lambda: self._read_text(self.name(index), self.caption(index)))

    def read(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        latents = self.latents(index)
        # In float64 so that sigmas are the quantile function's own to rounding.
        place, drop = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        text = self.empty_text if drop < self._randomness.caption_dropout else self.text(index)
        return {
            "latents": latents,
            "text": text,
            "sigma": torch.tensor(self._randomness.sigma.quantile(place), dtype=torch.float32),
            "noise": torch.randn(latents.shape, generator=generator),
        }

    def _read_text(self, name: str, caption: str) -> Tensor:
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
