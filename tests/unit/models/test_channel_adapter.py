"""Latents of one number of channels seen with another."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models.channel_adapter import ChannelAdapter, fit_adapter, random_adapter


@pytest.fixture
def latents():
    """Latents of 8 channels with a mean, whose channels are mixtures of few causes and a little noise."""
    generator = torch.Generator().manual_seed(1)
    causes = torch.randn(4, 3, 2, 8, 8, generator=generator)
    mixture = torch.randn(8, 3, generator=generator)
    noise = 0.1 * torch.randn(4, 8, 2, 8, 8, generator=generator)
    return torch.einsum("tc,bcfhw->btfhw", mixture, causes) + noise + torch.arange(8.0).view(1, 8, 1, 1, 1)


def channels_of(latents):
    return latents.movedim(1, 0).flatten(1)


@pytest.mark.parametrize("shape", [(8, 3), (8, 8), (3, 8), (16, 4), (1, 1)])
def test_random_directions_are_orthonormal_and_of_their_seed(shape):
    adapter = random_adapter(*shape, seed=5)
    matrix = adapter.matrix.double()
    product = matrix @ matrix.T if shape[1] <= shape[0] else matrix.T @ matrix
    torch.testing.assert_close(product, torch.eye(min(shape), dtype=torch.float64), atol=1e-6, rtol=0)
    assert (adapter.teacher_channels, adapter.student_channels) == shape
    assert torch.equal(adapter.matrix, random_adapter(*shape, seed=5).matrix)
    if min(shape) > 1:
        assert not torch.allclose(adapter.matrix, random_adapter(*shape, seed=6).matrix)


@pytest.mark.parametrize("make", [lambda x: fit_adapter(3, x), lambda x: random_adapter(8, 3, latents=[x])])
def test_back_and_forth_is_the_projection_about_the_mean(latents, make):
    adapter = make(latents)
    matrix = adapter.matrix
    centred = channels_of(latents) - channels_of(latents).mean(1, keepdim=True)
    expected = matrix.T @ matrix @ centred + channels_of(latents).mean(1, keepdim=True)
    once = adapter.up(adapter.down(latents))
    torch.testing.assert_close(channels_of(once), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(adapter.up(adapter.down(once)), once, atol=1e-4, rtol=1e-4)


def test_more_channels_lose_nothing(latents):
    for adapter in (random_adapter(8, 12), random_adapter(8, 8, latents=[latents]), fit_adapter(8, latents)):
        torch.testing.assert_close(adapter.up(adapter.down(latents)), latents, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("make", [lambda x: fit_adapter(3, x), lambda x: random_adapter(8, 3, latents=x)])
def test_mapped_latents_have_no_mean_and_unit_variance(latents, make):
    mapped = channels_of(make([latents[:1], latents[1:]]).down(latents))
    torch.testing.assert_close(mapped.mean(1), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(mapped.var(1, correction=0), torch.ones(3), atol=1e-3, rtol=0)


def test_a_fitted_map_loses_what_the_smallest_eigenvalues_say_and_less_than_a_random_one(latents):
    def lost(adapter):
        return float((adapter.up(adapter.down(latents)) - latents).square().sum(1).mean())

    eigenvalues = torch.linalg.eigvalsh(torch.cov(channels_of(latents).double(), correction=0))
    assert lost(fit_adapter(3, latents)) == pytest.approx(float(eigenvalues[:5].sum()), rel=1e-3)
    random = [lost(random_adapter(8, 3, seed=seed, latents=[latents])) for seed in range(5)]
    assert 10 * lost(fit_adapter(3, latents)) < min(random)


def test_white_noise_stays_white(latents):
    noise = torch.randn(8, 8, 4, 32, 32, generator=torch.Generator().manual_seed(2))
    rotated = channels_of(fit_adapter(3, latents).rotate(noise))
    torch.testing.assert_close(torch.cov(rotated), torch.eye(3), atol=0.03, rtol=0)


def test_it_follows_the_dtype_of_latents(latents):
    adapter = fit_adapter(3, latents)
    assert adapter.down(latents.bfloat16()).dtype == torch.bfloat16
    assert adapter.up(adapter.down(latents.double())).dtype == torch.float64


def test_saved_and_loaded(latents, tmp_path):
    adapter = fit_adapter(3, latents)
    adapter.save(tmp_path / "student")
    loaded = ChannelAdapter.load(tmp_path / "student")
    assert loaded.kind == "pca"
    assert torch.equal(loaded.down(latents), adapter.down(latents))
    assert json.loads((tmp_path / "student" / "channel_adapter.json").read_text())["teacher_channels"] == 8


def test_a_damaged_one_is_refused(latents, tmp_path):
    with pytest.raises(CheckpointError, match="no usable channel adapter"):
        ChannelAdapter.load(tmp_path)
    fit_adapter(3, latents).save(tmp_path)
    weights, config = tmp_path / "channel_adapter.safetensors", tmp_path / "channel_adapter.json"
    tensors = load_file(weights)
    for changed, message in (
        ({**tensors, "matrix": 2 * tensors["matrix"]}, "not orthonormal"),
        ({**tensors, "std": tensors["std"][:2].clone()}, "do not fit"),
        ({**tensors, "std": torch.zeros(3)}, "positive"),
        ({"matrix": tensors["matrix"]}, "mean"),
    ):
        save_file(changed, weights)
        with pytest.raises(CheckpointError, match=message):
            ChannelAdapter.load(tmp_path)
    save_file(tensors, weights)
    config.write_text(json.dumps({"teacher_channels": 16, "student_channels": 3, "kind": "pca"}))
    with pytest.raises(CheckpointError, match="16 -> 3"):
        ChannelAdapter.load(tmp_path)
    config.write_text("[]")
    with pytest.raises(CheckpointError, match="no usable"):
        ChannelAdapter.load(tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: random_adapter(8, 0), "from 8 to 0 channels"),
        (lambda x: fit_adapter(-1, x), "to -1 channels"),
        (lambda x: fit_adapter(9, x), "cannot be fitted"),
        (lambda x: fit_adapter(3, x[:1, :, :1, :2, :2]), "4 positions of latents for 8"),
        (lambda x: fit_adapter(3, []), "0 positions"),
        (lambda x: fit_adapter(3, x[0]), "shape"),
        (lambda x: fit_adapter(3, x / 0), "not finite"),
        (lambda x: fit_adapter(3, x * 0 + 1), "constant"),
        (lambda x: fit_adapter(3, x[:, :1].expand(-1, 8, -1, -1, -1)), "constant"),
        (lambda x: random_adapter(16, 3, latents=[x]), "batch, 16"),
        (lambda x: random_adapter(16, 3).down(x), "batch, 16"),
        (lambda x: random_adapter(8, 3).up(x), "batch, 3"),
    ],
)
def test_nonsense(latents, call, message):
    with pytest.raises(UsageError, match=message):
        call(latents)
