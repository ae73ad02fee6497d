"""Tiles against diffusers' own passes over the whole."""

import pytest
import torch
from diffusers import AutoencoderKLWan
from helpers.live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from wandistiller import WanVAE
from wandistiller.errors import UsageError
from wandistiller.models import vae_tiles
from wandistiller.models.sizes import TINY_VAE, WAN21_VAE, WAN22_VAE
from wandistiller.models.vae_tiles import (
    FeatureCache,
    Tile,
    decode_tiled,
    decode_upper,
    decoder_reaches,
    encode_tiled,
    encoder_reach,
    split_encoder,
)

SMALL = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
CONFIGS = {
    "wan2.1": dict(TINY_VAE),
    "wan2.1, as deep as released": {**TINY_VAE, "num_res_blocks": 2},
    "wan2.2": {**WAN22_VAE, **SMALL, "decoder_base_dim": 16},
}
TOLERANCE = 1e-5
"""What the help texts promise; pixels go from -1 to 1."""


@pytest.fixture(scope="module", params=CONFIGS)
def vae(request):
    torch.manual_seed(0)
    return AutoencoderKLWan(**CONFIGS[request.param]).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return AutoencoderKLWan(**TINY_VAE).eval().requires_grad_(False)


def make_pixels(vae, frames, height, width, kind="noise"):
    """Pixels for latents of this height and width."""
    height, width = (side * vae.config.scale_factor_spatial for side in (height, width))
    if kind == "noise":
        return torch.rand(1, 3, frames, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1
    time, y, x = torch.meshgrid(*(torch.linspace(0, 1, size) for size in (frames, height, width)), indexing="ij")
    disc = ((x - 0.4 - 0.2 * time) ** 2 + (y - 0.5) ** 2 < 0.05).float() * 2 - 1
    board = ((x * width // 16 + y * height // 16) % 2) * 2 - 1
    return torch.stack([torch.sin(20 * x + 6 * time), disc, board])[None]


def make_latents(vae, frames, height, width):
    shape = (1, vae.config.z_dim, (frames - 1) // 4 + 1, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 2


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("frames", "height", "width", "tile", "kind"),
    [(1, 11, 7, 3, "noise"), (1, 8, 8, 4, "picture"), (9, 7, 9, 5, "picture"), (13, 3, 13, 7, "noise")],
)
def test_tiles_are_the_whole(vae, frames, height, width, tile, kind):
    pixels = make_pixels(vae, frames, height, width, kind)
    expected, found = vae.encode(pixels).latent_dist, encode_tiled(vae, pixels, tile=tile)
    assert_near(found.mean, expected.mean)
    assert_near(found.logvar, expected.logvar)
    latents = make_latents(vae, frames, height, width)
    expected = vae.decode(latents).sample
    assert expected.std() > 0.1
    assert_near(decode_tiled(vae, latents, tile=tile), expected)


def test_batches_and_clips_of_one_tile_that_are_long(tiny, monkeypatch):
    monkeypatch.setattr(vae_tiles, "TILE_FRAMES", 2)
    pixels = torch.cat([make_pixels(tiny, 9, 4, 4), make_pixels(tiny, 9, 4, 4, "picture")])
    assert_near(encode_tiled(tiny, pixels).mean, tiny.encode(pixels).latent_dist.mean)
    latents = torch.randn(2, 8, 3, 4, 4)
    assert_near(decode_tiled(tiny, latents), tiny.decode(latents).sample)


@pytest.mark.parametrize(
    ("config", "encoding", "decoding"), [(WAN21_VAE, (29, 36), [7, 12, 10, 7]), (WAN22_VAE, (29, 36), [7, 12, 10, 7])]
)
def test_surroundings_of_the_released_vaes(config, encoding, decoding):
    """Counted by hand: convolutions of a stage, halved or doubled on the way."""
    with torch.device("meta"):
        vae = AutoencoderKLWan(**config)
    assert encoder_reach(split_encoder(vae.encoder)[0]) == encoding
    assert decoder_reaches(vae.decoder) == decoding


def encode_upper(vae, pixels):
    hidden = vae.encoder.conv_in(pixels)
    for block in split_encoder(vae.encoder)[0]:
        hidden = block(hidden)
    return hidden


@pytest.mark.parametrize("axis", [3, 4])
def test_the_encoder_sees_its_surroundings_and_no_more(vae, axis):
    """A pixel that is not a number reaches exactly those features that look at it."""
    before, after = encoder_reach(split_encoder(vae.encoder)[0])
    kept = slice(10, 13)

    def is_touched(position):
        pixels = torch.zeros(1, vae.config.in_channels, 1, *((192, 8) if axis == 3 else (8, 192)))
        pixels.select(axis, position).fill_(float("nan"))
        features = encode_upper(vae, pixels)
        return features.narrow(axis, kept.start, kept.stop - kept.start).isnan().any()

    assert [bool(is_touched(kept.start * 8 - reach)) for reach in (before, before + 1)] == [True, False]
    assert [bool(is_touched(kept.stop * 8 - 1 + reach)) for reach in (after, after + 1)] == [True, False]


@pytest.mark.parametrize("axis", [3, 4])
def test_the_decoder_sees_its_surroundings_and_no_more(vae, axis):
    reach, size, kept = decoder_reaches(vae.decoder)[0], 22, slice(10, 12)
    whole = Tile(slice(0, size), slice(0, 1), size, 1) if axis == 3 else Tile(slice(0, 1), slice(0, size), 1, size)
    resnet = vae.decoder.up_blocks[0].resnets[-1]
    channels = resnet.out_dim * (2 if vae.config.is_residual else 1)

    def is_touched(position):
        features = torch.zeros(1, channels, 1, whole.height, whole.width)
        features.select(axis, position).fill_(float("nan"))
        pixels = decode_upper(vae.decoder, features, whole, FeatureCache(vae.decoder), is_first=True)
        return pixels.narrow(axis, kept.start * 8, (kept.stop - kept.start) * 8).isnan().any()

    assert [bool(is_touched(kept.start - away)) for away in (reach, reach + 1)] == [True, False]
    assert [bool(is_touched(kept.stop - 1 + away)) for away in (reach, reach + 1)] == [True, False]


def test_smaller_surroundings_are_seen(tiny, monkeypatch):
    """That the comparisons above would notice."""
    pixels, latents = make_pixels(tiny, 1, 12, 12), make_latents(tiny, 1, 12, 12)
    monkeypatch.setattr(vae_tiles, "encoder_reach", lambda upper: (8, 8))
    monkeypatch.setattr(vae_tiles, "decoder_reaches", lambda decoder: [2, 3, 2, 1])
    assert (encode_tiled(tiny, pixels, tile=4).mean - tiny.encode(pixels).latent_dist.mean).abs().max() > 10 * TOLERANCE
    assert (decode_tiled(tiny, latents, tile=4) - tiny.decode(latents).sample).abs().max() > 10 * TOLERANCE


def peak_bytes(config, frames, height, width, run):
    """Return the peak of live bytes beside the weights; shapes alone are computed, so the real sizes can be taken."""
    with FakeTensorMode(), torch.no_grad():
        vae = AutoencoderKLWan(**config)
        factor = config["scale_factor_spatial"]
        pixels = torch.empty(1, 3, frames, height * factor, width * factor)
        latents = torch.empty(1, config["z_dim"], (frames - 1) // 4 + 1, height, width)
        with LiveBytes() as live:
            run(vae, pixels, latents)
    return live.peak


@pytest.mark.parametrize("config", [WAN21_VAE, WAN22_VAE])
def test_memory_falls(config):
    """At the released sizes. The device is the host here, so what is collected on the host is in the figures."""
    whole = peak_bytes(config, 5, 48, 72, lambda vae, pixels, latents: vae.encode(pixels))
    assert peak_bytes(config, 5, 48, 72, lambda vae, pixels, latents: encode_tiled(vae, pixels)) < 0.4 * whole
    whole = peak_bytes(config, 5, 48, 72, lambda vae, pixels, latents: vae.decode(latents))
    assert peak_bytes(config, 5, 48, 72, lambda vae, pixels, latents: decode_tiled(vae, latents)) < 0.25 * whole


def test_memory_of_a_longer_clip_is_only_what_is_collected():
    def run(vae, pixels, latents):
        decode_tiled(vae, latents, tile=6)

    short, long = (peak_bytes(TINY_VAE, frames, 12, 6, run) for frames in (9, 17))
    collected = 8 * 3 * 96 * 48 * 4 + 2 * 32 * 12 * 6 * 4  # pixels, and features at the resolution of latents
    assert long - short <= collected * 1.01


@pytest.mark.parametrize("size", [24, 25])
def test_what_fits_a_tile_is_not_cut(tiny, monkeypatch, size):
    calls = []
    monkeypatch.setattr(tiny, "_encode", lambda given: calls.append("encode") or AutoencoderKLWan._encode(tiny, given))
    monkeypatch.setattr(tiny, "_decode", lambda given: calls.append("decode") or AutoencoderKLWan._decode(tiny, given))
    encode_tiled(tiny, make_pixels(tiny, 1, 2, size))
    decode_tiled(tiny, make_latents(tiny, 1, size, 2))
    assert calls == (["encode", "decode"] if size == 24 else [])


@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_gradients_are_those_of_the_whole(tiny, direction):
    given = (make_pixels if direction == "encode" else make_latents)(tiny, 5, 6, 6).requires_grad_()
    if direction == "encode":
        outputs = tiny.encode(given).latent_dist.mean, encode_tiled(tiny, given, tile=4).mean
    else:
        outputs = tiny.decode(given).sample, decode_tiled(tiny, given, tile=4)
    expected, found = (torch.autograd.grad(output.square().sum(), given)[0] for output in outputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "tile", "message"),
    [
        ((1, 3, 1, 64, 64), 0, "A tile of 0 latents"),
        ((3, 1, 64, 64), 4, "no clip's shape"),
        ((1, 3, 0, 64, 64), 4, "no clip's shape"),
        ((1, 3, 1, 60, 64), 4, "1 frames of 64x60 pixels .* multiples of 8"),
        ((1, 3, 8, 64, 64), 4, "8 frames of 64x64 pixels .* multiple of 4"),
    ],
)
def test_nonsense_is_refused(tiny, shape, tile, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        encode_tiled(tiny, torch.zeros(shape), tile=tile)
    if "pixels" not in message:
        with pytest.raises(UsageError, match=message):
            decode_tiled(tiny, torch.zeros(shape), tile=tile)


@pytest.mark.parametrize("name", ["wan2.1", "wan2.2"])
def test_the_tiling_of_wan_vae(name):
    torch.manual_seed(0)
    vae = WanVAE(**CONFIGS[name]).eval().requires_grad_(False)
    pixels, latents = make_pixels(vae, 5, 7, 9), make_latents(vae, 5, 7, 9)
    mean, sample = vae.encode(pixels).latent_dist.mean, vae.decode(latents).sample
    side = 5 * vae.config.scale_factor_spatial
    vae.enable_tiling(side, side)
    assert_near(vae.encode(pixels).latent_dist.mean, mean)
    assert_near(vae.decode(latents, return_dict=False)[0], sample)
    vae.enable_tiling(4, 4)
    with pytest.raises(UsageError, match="A tile of 4 pixels is smaller than a latent"):
        vae.decode(latents)
