"""How well a VAE reconstructs data that it is not trained on: PSNR, SSIM, LPIPS, marks, and pictures side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from wandistiller.data.judge import Marks, judge
from wandistiller.data.media import to_bytes, write_picture
from wandistiller.data.pixel_samples import PixelSamples, from_all_over
from wandistiller.data.sources import WorldSource
from wandistiller.models.vae_passes import VaePass, decode_unclamped, encode_distribution
from wandistiller.terminal import say
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
LEAST_SIDE = 128
"""Pixels that a picture is enlarged to where it is shown."""
_NAMES = ("psnr", "psnr_pictures", "psnr_clips", "ssim", "lpips", "marks", "marks_original")


class MeasureReconstructions(EverySoOften):
    """Measures held-out reconstructions every so often and at the end, of ``limit`` samples at most; ranks share them.

    Of a held-out world its judge also says what of each caption is there, in the reconstruction and in the original.
    """

    what = "the reconstructions of held-out data"

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
        self._chosen = from_all_over(len(samples), limit)
        self._is_world = isinstance(samples.source, WorldSource)
        self.quality: dict[str, float] = {}

    @torch.no_grad()
    def act(self, loop: Loop) -> None:
        sums = torch.zeros(2, len(_NAMES), dtype=torch.float64)
        shown: list[tuple[Tensor, Tensor]] = []
        with in_use(self._average), self._role.whole():
            turns = [(self._chosen[place], counts) for place, counts in loop.ranks.turns(len(self._chosen))]
            mine = [index for index, counts in turns if counts]
            for index, counts in sorted(turns):
                loop.heed_signals()
                if not counts:
                    continue
                wanted = self._samples.pixels(index)[None].to(loop.device)
                found = reconstruct(cast(VaePass, self._role.model), wanted, loop)
                for name, (value, weight) in self._measure(index, found, wanted).items():
                    sums[:, _NAMES.index(name)] += torch.tensor([value, weight], dtype=torch.float64)
                if index in mine[:NUM_SHOWN]:
                    shown.append((wanted[0].cpu(), found[0].cpu()))
        totals, weights = loop.ranks.mean(sums).tolist()
        means = zip(_NAMES, totals, weights, strict=True)
        self.quality = {f"held_out/{name}": total / weight for name, total, weight in means if weight}
        self._metrics.write(loop, self.quality)
        if loop.ranks.is_first:
            say(f"Step {loop.step}, held-out data: {_in_words(self.quality)}")
            settings = {"step": loop.step, **self.quality}
            write_picture(self._folder / f"step-{loop.step:08d}.png", side_by_side(shown), settings)

    def _measure(self, index: int, found: Tensor, wanted: Tensor) -> dict[str, tuple[float, float]]:
        """Return what is measured of one sample, each with how much it counts."""
        ratio = float(psnr(found, wanted).mean())
        kind = "psnr_pictures" if wanted.shape[2] == 1 else "psnr_clips"
        values = {"psnr": (ratio, 1.0), kind: (ratio, 1.0), "ssim": (float(ssim(found, wanted).mean()), 1.0)}
        if self._perceptual is not None:
            values["lpips"] = (float(self._perceptual(found, wanted).mean()), 1.0)
        for name, pixels in (("marks", found), ("marks_original", wanted)) if self._is_world else ():
            marks = Marks()
            marks.add(judge(to_bytes(pixels[0]), self._samples.caption(index)))
            values[name] = (marks.right.total(), marks.total.total())
        return values


def _in_words(quality: Mapping[str, float]) -> str:
    """Return the numbers as people say them."""
    value = {name.removeprefix("held_out/"): number for name, number in quality.items()}
    parts = [f"PSNR {value['psnr']:.2f} dB", f"SSIM {value['ssim']:.4f}"]
    if "psnr_pictures" in value and "psnr_clips" in value:
        parts[0] += f" (pictures {value['psnr_pictures']:.2f}, clips {value['psnr_clips']:.2f})"
    if "lpips" in value:
        parts.append(f"LPIPS {value['lpips']:.4f}")
    if "marks" in value:
        parts.append(f"marks {value['marks']:.1%}, of the originals {value['marks_original']:.1%}")
    return ", ".join(parts)


def reconstruct(vae_pass: VaePass, pixels: Tensor, loop: Loop) -> Tensor:
    """Return pixels through the most probable latents, clamped as a decoder's user gets them."""
    with autocast(loop.options.precision, loop.device):
        mean, _ = encode_distribution(vae_pass.vae, pixels)
        return decode_unclamped(vae_pass.vae, mean).float().clamp(-1, 1)


def side_by_side(pairs: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Return one picture (1, height, width, 3): originals above, reconstructions below; of clips the first frame, the one
    in the middle and the last. Small ones are enlarged, so that people see them."""
    columns = []
    for pair in pairs:
        wanted, found = (to_bytes(each) for each in pair)
        scale = max(LEAST_SIDE // min(wanted.shape[1:3]), 1)
        for frame in sorted({0, len(wanted) // 2, len(wanted) - 1}):
            column = np.concatenate([wanted[frame], found[frame]])
            columns.append(column.repeat(scale, axis=0).repeat(scale, axis=1))
    height = max(column.shape[0] for column in columns)
    padded = [np.pad(column, ((0, height - column.shape[0]), (0, 4), (0, 0))) for column in columns]
    return np.concatenate(padded, axis=1)[None]
