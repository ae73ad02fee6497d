"""The sigmas that training visits, as quantile functions: a number from 0 to 1 gives a sigma.

So one uniform random number a sample is all the randomness there is, held-out losses can be taken at fixed quantiles, and a
range of sigmas (one expert's) is a range of quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from wandistiller.flow.schedule import shift, unshift

_NORMAL = NormalDist()


@dataclass(frozen=True)
class _Shape:
    quantile: Callable[[float, SigmaDistribution], float]
    share_below: Callable[[float, SigmaDistribution], float]


@dataclass(frozen=True, kw_only=True)
class SigmaDistribution:
    """Which sigmas are drawn how often: a base shape, shifted towards noise, cut to a range."""

    shape: str = "uniform"
    mean: float = 0.0
    """Mean of the logit, for ``logit_normal``."""
    std: float = 1.0
    """Standard deviation of the logit, for ``logit_normal``."""
    shift: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def quantile(self, u: float) -> float:
        """Return the sigma that a share ``u`` of all draws is below."""
        start, end = self._share_below(self.low), self._share_below(self.high)
        base = SIGMA_SHAPES[self.shape].quantile(start + u * (end - start), self)
        return min(max(shift(base, self.shift), self.low), self.high)

    def _share_below(self, sigma: float) -> float:
        return SIGMA_SHAPES[self.shape].share_below(unshift(sigma, self.shift), self)


def _logit_normal_quantile(u: float, of: SigmaDistribution) -> float:
    # The ends are at infinite logits, that is, at sigma 0 and 1.
    if u <= 0 or u >= 1:
        return float(u >= 1)
    return 1 / (1 + math.exp(-(of.mean + of.std * _NORMAL.inv_cdf(u))))


def _logit_normal_share(sigma: float, of: SigmaDistribution) -> float:
    if sigma <= 0 or sigma >= 1:
        return float(sigma >= 1)
    return _NORMAL.cdf((math.log(sigma / (1 - sigma)) - of.mean) / of.std)


SIGMA_SHAPES: dict[str, _Shape] = {
    "uniform": _Shape(lambda u, of: u, lambda sigma, of: sigma),
    "logit_normal": _Shape(_logit_normal_quantile, _logit_normal_share),
}
