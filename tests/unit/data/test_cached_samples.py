"""Samples from caches: what is drawn for each of them."""

import pytest
import torch

from wandistiller.data.buckets import Bucket
from wandistiller.data.cached_samples import CachedSamples, Randomness
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.loader import sample_generator
from wandistiller.data.sources import WorldSource
from wandistiller.data.text_cache import TextCache, entry
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.units import Bytes

BUCKET = Bucket(1, 32, 32)
SIGMA = SigmaDistribution(shape="logit_normal", shift=3.0, low=0.2, high=0.9)
DRAWS = 2000


@pytest.fixture
def open_samples(tmp_path):
    source = WorldSource(2)
    texts, latents = TextCache(tmp_path, encoder=None), LatentCache(tmp_path, vae=None)
    for index in range(-1, 2):
        embeddings = torch.zeros(512, 4)
        embeddings[: index + 3] = index + 2.0
        texts.write(*entry(source, index), embeddings, encoder_path="somewhere")
    for index in range(2):
        origin = {"stamp": "", "media": "", "vae_path": "", "vae_dtype": torch.float32}
        latents.write(source.name(index), BUCKET, torch.full((8, 1, 4, 4), float(index)), **origin)

    def make(dropout, trims_text):
        options = {"randomness": Randomness(sigma=SIGMA, caption_dropout=dropout), "memory": Bytes(10**9)}
        return CachedSamples(source, [BUCKET] * 2, texts, latents, text_width=4, trims_text=trims_text, **options)

    return make


@pytest.mark.parametrize("trims_text", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
def test_so_many_captions_are_replaced_by_the_empty_ones_embeddings(open_samples, dropout, trims_text):
    samples = open_samples(dropout, trims_text)
    empty = torch.zeros(512, 4)
    empty[:2] = 1.0
    found = [samples.read(1, sample_generator(0, epoch, 1))["text"] for epoch in range(DRAWS)]
    dropped = [text.shape == samples.empty_text.shape and torch.equal(text, samples.empty_text) for text in found]
    assert torch.equal(samples.empty_text, empty[: len(samples.empty_text)])
    assert 2 <= len(samples.empty_text) < 512 if trims_text else len(samples.empty_text) == 512
    assert sum(dropped) / DRAWS == pytest.approx(dropout, abs=0.03)
    assert all(torch.equal(text, samples.text(1)) for text, is_empty in zip(found, dropped, strict=True) if not is_empty)


def test_sigmas_are_those_of_the_distribution_and_noise_is_normal(open_samples):
    samples = open_samples(0.3, False)
    found = [samples.read(0, sample_generator(0, epoch, 0)) for epoch in range(DRAWS)]
    sigmas = torch.stack([each["sigma"] for each in found]).sort().values
    expected = torch.tensor([SIGMA.quantile((number + 0.5) / DRAWS) for number in range(DRAWS)])
    assert float((sigmas - expected).abs().max()) < 0.03
    noise = torch.stack([each["noise"] for each in found])
    assert float(noise.mean()) == pytest.approx(0, abs=0.01) and float(noise.std()) == pytest.approx(1, abs=0.01)


def test_a_caption_that_is_edited_meanwhile_changes_nothing(open_samples, monkeypatch):
    """It was encoded before; whoever trains for weeks may write on."""
    samples = open_samples(0.0, False)
    monkeypatch.setattr(WorldSource, "caption", lambda self, index: "something else")
    assert float(samples.text(1)[0, 0]) == 3.0
