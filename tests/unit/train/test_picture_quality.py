"""Picture quality against the formulas, worked out a second way in NumPy."""

import math

import numpy as np
import pytest
import torch

from wandistiller.train.picture_quality import psnr, ssim


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pictures(*shape):
    return torch.rand(*shape) * 2 - 1


def test_psnr_by_formula():
    wanted = pictures(3, 3, 2, 8, 8).double() * 0.5
    offsets = [0.02, 0.2, 2.0]
    found = wanted + torch.tensor(offsets, dtype=torch.float64).view(3, 1, 1, 1, 1)
    # An error of d everywhere is 20 log10(2 / d): 40, 20 and 0 dB.
    assert psnr(found, wanted).tolist() == pytest.approx([20 * math.log10(2 / offset) for offset in offsets], abs=1e-9)
    assert psnr(wanted, wanted).tolist() == [math.inf] * 3


def test_psnr_is_that_of_eight_bits():
    first, second = (np.random.default_rng(number).integers(0, 256, (1, 3, 2, 16, 16)) for number in (1, 2))
    error = ((first - second) ** 2).mean()
    found, wanted = (torch.from_numpy(pixels / 127.5 - 1) for pixels in (first, second))
    assert psnr(found, wanted).item() == pytest.approx(10 * math.log10(255**2 / error), rel=1e-12)


def ssim_by_hand(first, second):
    """Wang et al. (2004), equations 13 to 17, window by window on 0 to 255, one frame and channel."""
    ticks = np.arange(-5, 6)
    window = np.exp(-(ticks[:, None] ** 2 + ticks[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    steady1, steady2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for row in range(first.shape[0] - 10):
        for column in range(first.shape[1] - 10):
            a, b = (picture[row : row + 11, column : column + 11] for picture in (first, second))
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            variance_a, variance_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            covariance = (window * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + steady1)
                * (2 * covariance + steady2)
                / ((mean_a**2 + mean_b**2 + steady1) * (variance_a + variance_b + steady2))
            )
    return np.mean(values)


def test_ssim_is_that_of_eight_bits_window_by_window():
    generator = np.random.default_rng(0)
    first = generator.integers(0, 256, (2, 3, 2, 14, 17)).astype(np.float64)
    second = np.clip(first + generator.normal(0, 40, first.shape), 0, 255)
    second[1] = second[1] * 0.5  # darker, and with half the contrast
    by_hand = [
        np.mean(
            [
                ssim_by_hand(first[number, channel, frame], second[number, channel, frame])
                for channel in range(3)
                for frame in range(2)
            ]
        )
        for number in range(2)
    ]
    found, wanted = (torch.from_numpy(pixels / 127.5 - 1) for pixels in (first, second))
    assert ssim(found, wanted).tolist() == pytest.approx(by_hand, rel=1e-10)
    assert ssim(found.float(), wanted.float()).tolist() == pytest.approx(by_hand, abs=1e-5)


def test_a_picture_is_like_itself_and_unlike_its_negative():
    wanted = pictures(2, 3, 3, 20, 16)
    assert ssim(wanted, wanted).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert (ssim(-wanted, wanted) < -0.5).all()
    torch.testing.assert_close(ssim(wanted * 0.3, wanted), ssim(wanted, wanted * 0.3))


def test_ssim_of_flat_pictures_by_formula():
    """Without structure only brightness counts; black is 0 and white 2 on the measure's scale."""
    black, white = torch.full((1, 3, 1, 16, 16), -1.0), torch.full((1, 3, 1, 16, 16), 1.0)
    steady = (0.01 * 2) ** 2
    assert ssim(black, white).item() == pytest.approx(steady / (2**2 + steady), rel=1e-3)
    assert ssim(black, black).item() == pytest.approx(1)


def test_samples_are_measured_alone():
    found, wanted = pictures(3, 3, 2, 16, 16), pictures(3, 3, 2, 16, 16)
    for measure in (psnr, ssim):
        together = measure(found, wanted)
        assert together.shape == (3,)
        torch.testing.assert_close(together, torch.cat([measure(found[i : i + 1], wanted[i : i + 1]) for i in range(3)]))


def test_sixteen_bits_are_measured_in_float32():
    found, wanted = pictures(1, 3, 1, 16, 16).bfloat16(), pictures(1, 3, 1, 16, 16).bfloat16()
    for measure in (psnr, ssim):
        assert measure(found, wanted).dtype == torch.float32
        assert measure(found, wanted).item() == pytest.approx(measure(found.double(), wanted.double()).item(), abs=1e-4)


def test_what_cannot_be_measured_is_refused():
    for measure in (psnr, ssim):
        with pytest.raises(ValueError, match="frames, height, width"):
            measure(pictures(1, 3, 2, 16, 16), pictures(1, 3, 1, 16, 16))
    with pytest.raises(ValueError, match="at least 11x11 pixels, but the picture has 16x10"):
        ssim(pictures(1, 3, 1, 16, 10), pictures(1, 3, 1, 16, 10))
