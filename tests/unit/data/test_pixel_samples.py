"""Pictures and clips as a VAE's training reads them."""

import torch

from wandistiller.data.buckets import Bucket
from wandistiller.data.pixel_samples import PixelSamples, from_all_over
from wandistiller.data.sources import open_source


def open_samples(**options):
    return PixelSamples(open_source("world:1:5x32x32").source, [Bucket(5, 32, 32)], **options)


def test_pixels_are_bytes_from_minus_one_to_one():
    samples = open_samples()
    wanted = torch.from_numpy(samples.source.read(0, Bucket(5, 32, 32)).copy()).double() / 127.5 - 1
    torch.testing.assert_close(samples.pixels(0).double(), wanted.permute(3, 0, 1, 2), rtol=0, atol=1e-6)


def test_half_of_them_are_mirrored_whole_and_with_the_same_noise():
    plain, mirroring, num_mirrored = open_samples(), open_samples(mirror=True), 0
    for number in range(200):
        first, second = (each.read(0, torch.Generator().manual_seed(number)) for each in (plain, mirroring))
        assert first["seed"] == second["seed"]
        is_mirrored = not torch.equal(first["pixels"], second["pixels"])
        if is_mirrored:
            assert torch.equal(second["pixels"], first["pixels"].flip(-1))
        num_mirrored += is_mirrored
    assert 70 < num_mirrored < 130


def test_some_of_many_are_from_all_over():
    chosen = from_all_over(1000, 100)
    assert len(set(chosen)) == 100
    assert 30 < sum(number < 500 for number in chosen) < 70
    assert sorted(from_all_over(7, 100)) == list(range(7))
    assert from_all_over(1000, 100) == chosen
