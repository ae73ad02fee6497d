"""The loss on data that is not trained on, at fixed quantiles of sigma and with fixed noise: numbers that can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from wandistiller.data.cached_samples import CachedSamples
from wandistiller.data.loader import sample_generator
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.terminal import say
from wandistiller.train.callbacks import EverySoOften
from wandistiller.train.ema import MovingAverage, in_use
from wandistiller.train.optimisation import autocast

if TYPE_CHECKING:
    from wandistiller.train.loop import Loop
    from wandistiller.train.runs import Run

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)


class MeasuresErrors(Protocol):
    """A method that can say how far off it is on given samples."""

    def held_out_errors(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


class MeasureHeldOut(EverySoOften):
    """Writes ``held_out/loss`` and one loss for each quantile; ranks share the samples."""

    what = "the loss on held-out data"

    def __init__(
        self,
        method: MeasuresErrors,
        samples: CachedSamples,
        sigma: SigmaDistribution,
        run: Run,
        *,
        average: MovingAverage | None = None,
        limit: int = 256,
    ) -> None:
        """Measure the ``average`` where there is one, on at most ``limit`` samples."""
        super().__init__(run.config.validate_every)
        self._method = method
        self._samples = samples
        self._sigma = sigma
        self._metrics = run.metrics
        self._average = average
        self._count = min(limit, len(samples))
        self._at_once = run.config.batch_size  # memory is enough to train on as many
        self.losses: dict[str, float] = {}

    def act(self, loop: Loop) -> None:
        sums = torch.zeros(len(QUANTILES) + 1, dtype=torch.float64)
        with in_use(self._average):
            for index, counts in loop.ranks.turns(self._count):
                loop.heed_signals()
                errors = self._errors(loop, index)
                if counts:
                    sums[:-1] += errors
                    sums[-1] += 1
        loop.ranks.mean(sums)
        means = (sums[:-1] / sums[-1]).tolist()
        named = {f"held_out/loss_at_{self._sigma.quantile(u):.2f}": value for u, value in zip(QUANTILES, means, strict=True)}
        self.losses = {"held_out/loss": sum(means) / len(means), **named}
        self._metrics.write(loop, self.losses)
        if loop.ranks.is_first:
            say(f"Step {loop.step}, held-out data: loss {self.losses['held_out/loss']:.4f}")

    def _errors(self, loop: Loop, index: int) -> torch.Tensor:
        """Return one sample's error at each quantile; the noise is the sample's own, the same every time."""
        latents = self._samples.latents(index).to(loop.device)
        noise = torch.randn(latents.shape, generator=sample_generator(0, 0, index)).to(loop.device)
        text = self._samples.text(index).to(loop.device)
        found = []
        for sigma in torch.tensor([self._sigma.quantile(u) for u in QUANTILES], device=loop.device).split(self._at_once):
            tensors = {
                "latents": latents.expand(len(sigma), *latents.shape),
                "noise": noise.expand(len(sigma), *noise.shape),
                "sigma": sigma,
                "text": text.expand(len(sigma), -1, -1),
            }
            with autocast(loop.options.precision, loop.device, caches=False):
                found.append(self._method.held_out_errors(tensors).cpu().double())
        return torch.cat(found)
