"""A Wan VAE's encode and decode in tiles, for what does not fit a device whole: equal to the whole to rounding, without seams.

Memory goes to the layers at high resolution, and each of these looks at neighbours only: convolutions, and norms of single
positions. A tile that is computed with as much of its surroundings as they can see, which is thrown away afterwards, is
therefore what the whole frame would have given. The attention, which sees all of a frame, is at the resolution of latents,
where a frame is small: that half is never tiled. In time a tile walks through the clip as diffusers does, a latent frame
after the other, each convolution handing its last features on, so that only one tile's are on the device. What goes from
one half to the other, and decoded pixels, wait on the host.

How far layers see is counted from the layers. With the released VAEs a tile is encoded with 4 latents of surroundings before
it and 5 after it, and decoded with 7 on each side, of which fewer and fewer are kept on the way up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    CACHE_T,
    WanCausalConv3d,
    WanResample,
    WanResidualBlock,
    WanResidualUpBlock,
    patchify,
    unpatchify,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn

from wandistiller.errors import UsageError

TILE = 24
"""Side of a tile in latents: 192 pixels with the VAE of Wan 2.1, 384 with that of Wan 2.2, surroundings not counted."""
TILE_FRAMES = 32
"""Latent frames up to which a clip that is no larger than a tile is not worth cutting."""
Window = tuple[slice, slice]
_CHUNK = 4
"""Frames that diffusers encodes at a time, after the first, which goes alone."""


def encode_tiled(vae: AutoencoderKLWan, pixels: Tensor, *, tile: int = TILE) -> DiagonalGaussianDistribution:
    """Return what ``vae.encode(pixels).latent_dist`` is, on the VAE's device; pixels may stay on the host.

    Tiles have sides of at most ``tile`` latents. What is not larger than one goes through ``vae.encode``.
    """
    spatial, patch = _check(vae, pixels, tile, is_encoding=True), vae.config.patch_size or 1
    frames, (height, width) = pixels.shape[2], (side // spatial for side in pixels.shape[3:])
    like, encoder = next(vae.parameters()), vae.encoder
    if max(height, width) <= tile and frames <= _CHUNK * TILE_FRAMES:
        return vae.encode(pixels.to(like.device, like.dtype)).latent_dist
    upper, lower = split_encoder(encoder)
    # In whole latents, so that every layer that halves begins at an even position.
    before, after = (-(-reach * patch // spatial) * spatial for reach in encoder_reach(upper))
    chunks = [slice(0, 1), *(slice(start, start + _CHUNK) for start in range(1, frames, _CHUNK))]
    features: list[Tensor] = []
    for each in _cut(height, width, tile):
        cache, window = FeatureCache(encoder), each.window(before, after, spatial)
        for index, chunk in enumerate(chunks):
            hidden = patchify(pixels[:, :, chunk, *window].to(like.device, like.dtype), patch)
            cache.rewind()
            hidden = cache.convolve(encoder.conv_in, hidden)
            for block in upper:
                hidden = block(hidden, **cache.options)
            if index == len(features):
                features.append(hidden.new_empty((*hidden.shape[:3], height, width), device="cpu"))
            given = each.window(before // spatial, after // spatial)
            features[index][..., *each.window()] = _crop(hidden, each.window(), given).cpu()
    return DiagonalGaussianDistribution(torch.cat(list(_encode_lower(vae, lower, features)), dim=2))


def _encode_lower(vae: AutoencoderKLWan, lower: list[nn.Module], features: list[Tensor]) -> Iterator[Tensor]:
    """Walk through whole frames at the resolution of latents."""
    encoder, cache = vae.encoder, FeatureCache(vae.encoder)
    for chunk in features:
        cache.rewind()
        hidden = chunk.to(next(vae.parameters()).device)
        for block in (*lower, encoder.mid_block):
            hidden = block(hidden, **cache.options)
        hidden = encoder.nonlinearity(encoder.norm_out(hidden))
        yield vae.quant_conv(cache.convolve(encoder.conv_out, hidden))


def decode_tiled(vae: AutoencoderKLWan, latents: Tensor, *, tile: int = TILE) -> Tensor:
    """Return what ``vae.decode(latents).sample`` is, on the host, where it is collected piece by piece.

    Tiles have sides of at most ``tile`` latents. What is not larger than one goes through ``vae.decode``.
    """
    spatial, patch = _check(vae, latents, tile, is_encoding=False), vae.config.patch_size or 1
    batch, _, frames, height, width = latents.shape
    like, decoder = next(vae.parameters()), vae.decoder
    if max(height, width) <= tile and frames <= TILE_FRAMES:
        return vae.decode(latents.to(like.device, like.dtype), return_dict=False)[0].cpu()
    features = list(_decode_lower(vae, latents))
    num_frames = 1 + (frames - 1) * 2 ** sum(vae.temperal_downsample)
    shape = (batch, vae.config.out_channels // patch**2, num_frames, height * spatial, width * spatial)
    pixels = torch.empty(shape, dtype=like.dtype)
    reaches = decoder_reaches(decoder)
    for each in _cut(height, width, tile):
        cache, end = FeatureCache(decoder), 0
        for chunk in features:
            cache.rewind()
            hidden = chunk[..., *each.window(reaches[0], reaches[0])].to(like.device)
            piece = unpatchify(decode_upper(decoder, hidden, each, cache, is_first=end == 0), patch)
            start, end = end, end + piece.shape[2]
            pixels[:, :, start:end, *each.window(scale=spatial)] = piece.clamp(-1.0, 1.0).cpu()
    return pixels


def _decode_lower(vae: AutoencoderKLWan, latents: Tensor) -> Iterator[Tensor]:
    """Walk through whole frames at the resolution of latents, to where they are made larger for the first time."""
    decoder, cache, like = vae.decoder, FeatureCache(vae.decoder), next(vae.parameters())
    block = decoder.up_blocks[0]
    for frame in latents.split(1, dim=2):
        cache.rewind()
        hidden = cache.convolve(decoder.conv_in, vae.post_quant_conv(frame.to(like.device, like.dtype)))
        entered = hidden = decoder.mid_block(hidden, **cache.options)
        for resnet in block.resnets:
            hidden = resnet(hidden, **cache.options)
        # The block of Wan 2.2 adds what entered it to what leaves it.
        yield (torch.cat([hidden, entered], dim=1) if isinstance(block, WanResidualUpBlock) else hidden).cpu()


def decode_upper(decoder: nn.Module, hidden: Tensor, tile: Tile, cache: FeatureCache, *, is_first: bool) -> Tensor:
    """Bring one chunk of a tile from the resolution of latents to that of pixels, shedding surroundings on the way."""
    reaches, scale = decoder_reaches(decoder), 1
    window = tile.window(reaches[0], reaches[0])
    for block, reach in zip(decoder.up_blocks, [*reaches[1:], None], strict=True):
        if block is not decoder.up_blocks[0]:
            hidden = block(hidden, **cache.options, first_chunk=is_first)
        elif isinstance(block, WanResidualUpBlock):
            hidden, entered = hidden.split([block.out_dim, block.in_dim], dim=1)
            hidden = block.upsampler(hidden, **cache.options) + block.avg_shortcut(entered, first_chunk=is_first)
        else:
            hidden = block.upsamplers[0](hidden, **cache.options)
        if reach is not None:
            rows, columns = (slice(2 * side.start, 2 * side.stop) for side in window)
            scale *= 2
            window = tile.window(reach, reach, scale)
            hidden = _crop(hidden, window, (rows, columns))
    hidden = cache.convolve(decoder.conv_out, decoder.nonlinearity(decoder.norm_out(hidden)))
    return _crop(hidden, tile.window(scale=scale), window)


def split_encoder(encoder: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the blocks above the resolution of latents, and those at it."""
    blocks = list(encoder.down_blocks)
    shrinking = [any(isinstance(module, WanResample) for module in block.modules()) for block in blocks]
    end = len(blocks) - shrinking[::-1].index(True)
    return blocks[:end], blocks[end:]


def encoder_reach(upper: list[nn.Module]) -> tuple[int, int]:
    """Return how many (patched) pixels before and after its own the upper half of the encoder sees."""
    before = after = 0
    for layer in reversed(list(_layers(upper))):
        if isinstance(layer, WanResample):  # 3 pixels of every 2: their own and the next
            before, after = 2 * before, 2 * after + 1
        else:
            before, after = before + 2, after + 2
    return before + 1, after + 1  # conv_in


def decoder_reaches(decoder: nn.Module) -> list[int]:
    """Return how far the decoder sees to each side: from latents, and from where each block but the first begins."""
    reach, reaches = 1, []  # conv_out
    for block in reversed(decoder.up_blocks[1:]):
        for layer in reversed(list(_layers([block]))):
            reach = _reach_below(reach) if isinstance(layer, WanResample) else reach + 2
        reaches.append(reach)
    return [_reach_below(reach), *reversed(reaches)]


def _reach_below(reach: int) -> int:
    """Return the reach before every position is doubled and a convolution follows."""
    return -(-(reach + 1) // 2)


def _layers(blocks: list[nn.Module]) -> Iterator[nn.Module]:
    """Go through all that looks at neighbours, in its order; a residual block has two convolutions."""
    for block in blocks:
        yield from (module for module in block.modules() if isinstance(module, (WanResidualBlock, WanResample)))


class FeatureCache:
    """What the causal convolutions of one tile hand on from one chunk of frames to the next."""

    def __init__(self, model: nn.Module) -> None:
        self._features: list[Any] = [None for module in model.modules() if isinstance(module, WanCausalConv3d)]
        self._index = [0]

    @property
    def options(self) -> dict[str, Any]:
        """What diffusers' blocks take."""
        return {"feat_cache": self._features, "feat_idx": self._index}

    def rewind(self) -> None:
        """Begin with the next chunk."""
        self._index[0] = 0

    def convolve(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Run one of the convolutions that diffusers' encoder and decoder feed themselves."""
        before = self._features[self._index[0]]
        last = hidden[:, :, -CACHE_T:].clone()
        if last.shape[2] < CACHE_T and before is not None:
            last = torch.cat([before[:, :, -1:], last], dim=2)
        self._features[self._index[0]] = last
        self._index[0] += 1
        return layer(hidden, before)


@dataclass(frozen=True)
class Tile:
    """Which rows and columns of a frame of latents of this height and width."""

    rows: slice
    columns: slice
    height: int
    width: int

    def window(self, before: int = 0, after: int = 0, scale: int = 1) -> Window:
        """Return it at ``scale`` times the resolution of latents, with its surroundings there as far as the frame goes."""

        def widen(side: slice, size: int) -> slice:
            return slice(max(0, side.start * scale - before), min(size * scale, side.stop * scale + after))

        return widen(self.rows, self.height), widen(self.columns, self.width)


def _cut(height: int, width: int, tile: int) -> Iterator[Tile]:
    """Cut a frame into as few tiles as possible, about as large as each other."""

    def share(size: int) -> list[slice]:
        num = -(-size // tile)
        return [slice(index * size // num, (index + 1) * size // num) for index in range(num)]

    return (Tile(rows, columns, height, width) for rows in share(height) for columns in share(width))


def _crop(hidden: Tensor, wanted: Window, given: Window) -> Tensor:
    """Copy a part of a window, so that the rest can go."""
    rows, columns = (slice(part.start - of.start, part.stop - of.start) for part, of in zip(wanted, given, strict=True))
    return hidden[..., rows, columns].contiguous()


def _check(vae: AutoencoderKLWan, given: Tensor, tile: int, *, is_encoding: bool) -> int:
    """Refuse what cannot be tiled; return how many pixels a latent is wide."""
    spatial = 2 ** len(vae.temperal_downsample) * (vae.config.patch_size or 1)
    if tile < 1:
        raise UsageError(f"A tile of {tile} latents is none.", fix=f"Give 1 or more; {TILE} is usual.")
    if given.ndim != 5 or 0 in given.shape:
        raise UsageError(f"{tuple(given.shape)} is no clip's shape.", fix="Give (batch, channels, frames, height, width).")
    frames, height, width = given.shape[2:]
    if is_encoding and (height % spatial or width % spatial or (frames - 1) % _CHUNK):
        raise UsageError(
            f"{frames} frames of {width}x{height} pixels cannot be encoded in tiles.",
            why=f"this VAE makes one latent of {spatial}x{spatial} pixels and of {_CHUNK} frames, the first frame apart.",
            fix=f"Crop to multiples of {spatial} and to one frame more than a multiple of {_CHUNK}.",
        )
    return spatial
