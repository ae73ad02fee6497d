"""Padding that is left away does not change what a Wan sees."""

import pytest
import torch
from diffusers import WanTransformer3DModel

from wandistiller.models.sizes import find_size
from wandistiller.models.text_padding import TEXT_TOKENS, can_fold_padding, cut_text, fold_padding, trim_padding


@pytest.fixture
def models():
    torch.manual_seed(0)
    config = find_size("tiny").transformer
    plain = WanTransformer3DModel(**config)
    folded = WanTransformer3DModel(**config)
    folded.load_state_dict(plain.state_dict())
    fold_padding(folded)
    return plain, folded


def padded(length, width, samples=2):
    text = torch.zeros(samples, TEXT_TOKENS, width)
    text[:, :length] = torch.randn(samples, length, width)
    return text


@pytest.mark.parametrize("length", [0, 1, 15, 16, 40, 510, 511, 512])
def test_a_trimmed_text_gives_the_same_velocity(models, length):
    plain, folded = models
    text = padded(length, plain.config.text_dim)
    latents = torch.randn(2, plain.config.in_channels, 1, 4, 4)
    times = torch.tensor([3.0, 700.0])
    with torch.no_grad():
        expected = plain(latents, times, text, return_dict=False)[0]
        found = folded(latents, times, trim_padding(text), return_dict=False)[0]
        without = folded(latents, times, text, return_dict=False)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(without, expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_the_same(models):
    plain, folded = models
    text = padded(20, plain.config.text_dim)
    latents = torch.randn(2, plain.config.in_channels, 2, 4, 4)
    times = torch.tensor([300.0, 900.0])
    for model, given in ((plain, text), (folded, trim_padding(text))):
        model(latents, times, given, return_dict=False)[0].square().sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), folded.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_padding_really_counts(models):
    """Else this would prove nothing: the same short text without the raised score is something else."""
    plain, _ = models
    text = padded(5, plain.config.text_dim)
    latents, times = torch.randn(2, plain.config.in_channels, 1, 4, 4), torch.tensor([3.0, 700.0])
    with torch.no_grad():
        whole = plain(latents, times, text, return_dict=False)[0]
        cut = plain(latents, times, trim_padding(text), return_dict=False)[0]
    assert (whole - cut).abs().max() > 1e-3


def test_trimming_keeps_all_words_and_one_token_of_padding():
    text = padded(31, 4)
    assert trim_padding(text).shape == (2, 32, 4)
    assert trim_padding(padded(32, 4)).shape == (2, 48, 4)
    assert trim_padding(padded(512, 4)).shape == (2, 512, 4)
    assert trim_padding(text[0]).shape == (32, 4)


def test_a_text_that_is_cut_is_the_shorter_one_with_padding():
    text = padded(20, 4)
    expected = torch.cat([text[:, :12], torch.zeros(2, 500, 4)], dim=1)
    assert torch.equal(cut_text(text, 12), expected)
    assert cut_text(text, 512) is text


def test_models_that_look_at_a_picture_and_long_videos_keep_the_padding():
    assert can_fold_padding(find_size("tiny").transformer, 64)
    assert not can_fold_padding(find_size("tiny").transformer, 30_000)
    assert not can_fold_padding(find_size("wan2.1-i2v-14b").transformer, 64)
