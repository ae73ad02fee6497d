"""Quantile functions against closed forms and against drawing."""

import math

import pytest
import torch

from wandistiller.flow.sigma import SIGMA_SHAPES, SigmaDistribution


@pytest.mark.parametrize("u", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_uniform(u):
    assert SigmaDistribution().quantile(u) == pytest.approx(u)
    assert SigmaDistribution(shift=3.0).quantile(u) == pytest.approx(3 * u / (1 + 2 * u))
    assert SigmaDistribution(low=0.2, high=0.6).quantile(u) == pytest.approx(0.2 + 0.4 * u)


def test_logit_normal_is_what_drawing_gives():
    """sigmoid of a normal number, as the literature draws it."""
    drawn = torch.sigmoid(0.3 + 0.8 * torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    shifted = 5 * drawn / (1 + 4 * drawn)
    distribution = SigmaDistribution(shape="logit_normal", mean=0.3, std=0.8, shift=5.0)
    for u in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert distribution.quantile(u) == pytest.approx(torch.quantile(shifted[:200_000], u).item(), abs=0.004)
    inside = shifted[(shifted > 0.875)]
    cut = SigmaDistribution(shape="logit_normal", mean=0.3, std=0.8, shift=5.0, low=0.875)
    for u in (0.1, 0.5, 0.9):
        assert cut.quantile(u) == pytest.approx(torch.quantile(inside[:200_000], u).item(), abs=0.004)


@pytest.mark.parametrize("shape", SIGMA_SHAPES)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.875, 1.0), (0.0, 0.875), (0.3, 0.4)])
def test_it_rises_and_stays_in_its_range(shape, low, high):
    distribution = SigmaDistribution(shape=shape, shift=3.0, low=low, high=high)
    values = [distribution.quantile(step / 100) for step in range(101)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(low, abs=1e-9)
    assert values[-1] == pytest.approx(high, abs=1e-9)
    assert all(math.isfinite(value) for value in values)
