"""Pictures and clips as pixels, for training a VAE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wandistiller.data.buckets import Bucket
from wandistiller.data.source_samples import SourceSamples
from wandistiller.data.sources import Source


class PixelSamples(SourceSamples):
    """Reads media into their buckets; half of them mirrored, if that is asked for."""

    def __init__(self, source: Source, buckets: Sequence[Bucket | None], *, mirror: bool = False) -> None:
        """``buckets`` has one entry an item of the source; those without a bucket are left out."""
        super().__init__(source, buckets)
        self._mirror = mirror

    def pixels(self, index: int) -> Tensor:
        """Return a sample (3, frames, height, width) from -1 to 1."""
        # A copy, because Pillow's arrays cannot be written to, and PyTorch warns of those.
        frames = torch.tensor(self.source.read(self.items[index], self.buckets[index]))
        return 2.0 * (frames.permute(3, 0, 1, 2).float() / 255) - 1.0

    def read(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        pixels = self.pixels(index)
        # For the noise in latent space, whose shape the sample does not know.
        seed = torch.randint(2**62, (), generator=generator)
        if self._mirror and torch.rand((), generator=generator) < 0.5:
            pixels = pixels.flip(-1)
        return {"pixels": pixels, "seed": seed}


def from_all_over(total: int, count: int) -> list[int]:
    """Return the numbers of ``count`` samples, always the same; not the first ones, because data are often sorted."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count].tolist()
