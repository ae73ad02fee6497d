"""How well a VAE reconstructs data that it is not trained on: PSNR, SSIM, LPIPS, and pictures side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from wandistiller.data.media import to_bytes, write_picture
from wandistiller.data.pixel_samples import PixelSamples
from wandistiller.models.vae_passes import VaePass, decode_unclamped, encode_distribution
from wandistiller.train.callbacks import EverySoOften
from wandistiller.train.ema import MovingAverage, in_use
from wandistiller.train.method import Role
from wandistiller.train.methods.vae import Perceptual
from wandistiller.train.metrics import WriteMetrics
from wandistiller.train.optimisation import autocast
from wandistiller.train.picture_quality import psnr, ssim

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop

NUM_SHOWN = 8


class MeasureReconstructions(EverySoOften):
    """Measures held-out reconstructions every so often and at the end; ranks share the samples."""

    def __init__(
        self,
        role: Role,
        samples: PixelSamples,
        metrics: WriteMetrics,
        folder: Path,
        *,
        every: int,
        average: MovingAverage | None = None,
        perceptual: Perceptual | None = None,
        limit: int = 128,
    ) -> None:
        super().__init__(every)
        self._role = role
        self._samples = samples
        self._metrics = metrics
        self._folder = folder
        self._average = average
        self._perceptual = perceptual
        self._count = min(limit, len(samples))
        self.quality: dict[str, float] = {}

    @torch.no_grad()
    def act(self, loop: Loop) -> None:
        names = ["psnr", "ssim", *(["lpips"] if self._perceptual is not None else [])]
        sums = torch.zeros(len(names) + 1, dtype=torch.float64)
        shown: list[tuple[Tensor, Tensor]] = []
        with in_use(self._average), self._role.whole():
            for index in range(loop.ranks.rank, self._count, loop.ranks.world_size):
                wanted = self._samples.pixels(index)[None].to(loop.device)
                found = reconstruct(cast(VaePass, self._role.model), wanted, loop)
                values = [psnr(found, wanted), ssim(found, wanted)]
                if self._perceptual is not None:
                    values.append(self._perceptual(found, wanted))
                sums += torch.tensor([*(float(value.mean()) for value in values), 1.0], dtype=torch.float64)
                if len(shown) < NUM_SHOWN:
                    shown.append((wanted[0].cpu(), found[0].cpu()))
        loop.ranks.mean(sums)
        self.quality = {f"held_out/{name}": float(value / sums[-1]) for name, value in zip(names, sums[:-1], strict=True)}
        self._metrics.write(loop, self.quality)
        if loop.ranks.is_first:
            settings = {"step": loop.step, **self.quality}
            write_picture(self._folder / f"step-{loop.step:08d}.png", side_by_side(shown), settings)


def reconstruct(vae_pass: VaePass, pixels: Tensor, loop: Loop) -> Tensor:
    """Return pixels through the most probable latents, clamped as a decoder's user gets them."""
    with autocast(loop.options.precision, loop.device):
        mean, _ = encode_distribution(vae_pass.vae, pixels)
        return decode_unclamped(vae_pass.vae, mean).float().clamp(-1, 1)


def side_by_side(pairs: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Return one picture (1, height, width, 3): originals above, reconstructions below; of clips first and last frame."""
    columns = []
    for pair in pairs:
        wanted, found = (to_bytes(each) for each in pair)
        for frame in sorted({0, len(wanted) - 1}):
            columns.append(np.concatenate([wanted[frame], found[frame]]))
    height = max(column.shape[0] for column in columns)
    padded = [np.pad(column, ((0, height - column.shape[0]), (0, 4), (0, 0))) for column in columns]
    return np.concatenate(padded, axis=1)[None]
