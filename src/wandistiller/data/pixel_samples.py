"""Pictures and clips as pixels, for training a VAE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wandistiller.data.buckets import Bucket
from wandistiller.data.sources import Source


class PixelSamples:
    """Reads media into their buckets; half of them mirrored, if that is asked for."""

    def __init__(self, source: Source, buckets: Sequence[Bucket | None], *, mirror: bool = False) -> None:
        """``buckets`` has one entry an item of the source; those without a bucket are left out."""
        self._source = source
        self._items = [index for index, bucket in enumerate(buckets) if bucket is not None]
        self.buckets = [bucket for bucket in buckets if bucket is not None]
        self._mirror = mirror

    def __len__(self) -> int:
        return len(self._items)

    def name(self, index: int) -> str:
        return self._source.name(self._items[index])

    def caption(self, index: int) -> str:
        """Return a sample's caption."""
        return self._source.caption(self._items[index])

    def pixels(self, index: int) -> Tensor:
        """Return a sample (3, frames, height, width) from -1 to 1."""
        frames = torch.from_numpy(self._source.read(self._items[index], self.buckets[index]))
        return 2.0 * (frames.permute(3, 0, 1, 2).float() / 255) - 1.0

    def read(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        pixels = self.pixels(index)
        # For the noise in latent space, whose shape the sample does not know.
        seed = torch.randint(2**62, (), generator=generator)
        if self._mirror and torch.rand((), generator=generator) < 0.5:
            pixels = pixels.flip(-1)
        return {"pixels": pixels, "seed": seed}
