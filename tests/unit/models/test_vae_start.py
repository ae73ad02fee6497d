"""A VAE from scratch lets pictures through from the first step on."""

import torch
from diffusers import AutoencoderKLWan

from wandistiller.models.sizes import TINY_VAE
from wandistiller.models.vae_start import initialise_vae


def test_different_pictures_have_different_latents_and_little_noise():
    torch.manual_seed(0)
    colours = torch.eye(3).reshape(3, 3, 1, 1, 1).expand(3, 3, 1, 32, 32) * 2 - 1
    plain, ours = AutoencoderKLWan(**TINY_VAE), AutoencoderKLWan(**TINY_VAE)
    initialise_vae(ours)
    with torch.no_grad():
        before, after = plain.encode(colours).latent_dist, ours.encode(colours).latent_dist
        # Signal: how far latents of different pictures lie apart; noise: the distribution's own width.
        assert after.mean.std(0).mean() > 5 * before.mean.std(0).mean()
        assert after.mean.std(0).mean() > 3 * after.std.mean()
        assert ours.decode(after.mean).sample.std(0).mean() > 10 * plain.decode(before.mean).sample.std(0).mean()
