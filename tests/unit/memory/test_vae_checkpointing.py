"""Checkpointing the VAE changes memory and nothing else."""

import copy
import pickle

import pytest
import torch
from helpers.live_bytes import LiveBytes

from wandistiller import WanVAE
from wandistiller.models.sizes import SIZES

CONFIGS = {
    "16 channels": {**SIZES["wan2.1-14b"].vae, "base_dim": 4},
    "48 channels": {**SIZES["wan2.2-5b"].vae, "base_dim": 8, "decoder_base_dim": 8},
}


def gradients(vae, pixels):
    for parameter in vae.parameters():  # allocated beforehand, so that the peak is that of activations
        parameter.grad = torch.zeros_like(parameter)
    pixels = pixels.clone().requires_grad_()
    with LiveBytes() as live:
        vae(pixels).sample.square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in vae.named_parameters()}
    return {**found, "pixels": pixels.grad}, live.peak


@pytest.mark.parametrize("frames", [1, 5, 9])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_gradients_at_a_lower_peak(name, frames):
    torch.manual_seed(0)
    vae = WanVAE(**CONFIGS[name])
    pixels = torch.randn(1, 3, frames, 64, 64)
    expected, plain_peak = gradients(vae, pixels)
    vae.enable_gradient_checkpointing()
    assert vae.is_gradient_checkpointing
    found, peak = gradients(vae, pixels)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5, msg=key)
    assert peak < 0.6 * plain_peak
    vae.disable_gradient_checkpointing()
    assert not vae.is_gradient_checkpointing
    again, _ = gradients(vae, pixels)
    assert all(torch.equal(again[key], value) for key, value in expected.items())


@pytest.mark.parametrize("frames", [1, 5])
def test_the_same_is_dropped_out_again(frames):
    torch.manual_seed(0)
    vae = WanVAE(**{**CONFIGS["16 channels"], "dropout": 0.3}).train()
    pixels, found = torch.randn(1, 3, frames, 32, 32), []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(gradients(vae, pixels)[0])
        vae.enable_gradient_checkpointing()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-5, atol=1e-5, msg=key)


def test_gradients_flow_from_one_chunk_to_the_one_before():
    """The naive way cuts or falsifies this: only the last frames are looked at, the first frame gets its share."""
    torch.manual_seed(0)
    vae = WanVAE(**CONFIGS["16 channels"], gradient_checkpointing=True)
    latents = torch.randn(1, 16, 3, 4, 4, requires_grad=True)
    vae.decode(latents).sample[:, :, -1].sum().backward()
    with_checkpointing = latents.grad.clone()
    vae.disable_gradient_checkpointing()
    latents.grad = None
    vae.decode(latents).sample[:, :, -1].sum().backward()
    assert with_checkpointing[:, :, 0].abs().max() > 0
    torch.testing.assert_close(with_checkpointing, latents.grad)


def test_inference_is_untouched():
    vae = WanVAE(**CONFIGS["16 channels"], gradient_checkpointing=True)
    pixels = torch.randn(1, 3, 5, 32, 32)
    with torch.no_grad():
        checkpointed = vae(pixels).sample
        vae.disable_gradient_checkpointing()
        assert torch.equal(vae(pixels).sample, checkpointed)


def test_copies_are_vaes_of_their_own():
    """An average of the weights is a copy, and must not compute with the original's."""
    vae = WanVAE(**CONFIGS["16 channels"], gradient_checkpointing=True)
    pixels = torch.randn(1, 3, 1, 32, 32)
    for twin in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.5)
            assert not torch.equal(twin(pixels).sample, vae(pixels).sample)
        twin(pixels).sample.sum().backward()
        assert twin.is_gradient_checkpointing
        assert twin.decoder.conv_in.weight.grad is not None
        assert vae.decoder.conv_in.weight.grad is None
