"""The two names of every tensor of a Wan VAE, and the configuration that its shapes tell.

The original lays a level's layers out as one list; diffusers groups them. Which is which depends on how many residual
blocks a level has, so translation takes that number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from wandistiller.errors import CheckpointError
from wandistiller.models.sizes import WAN21_VAE, WAN22_VAE

Shapes = Mapping[str, tuple[int, ...]]

_ENDS = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "encoder.conv_in": "encoder.conv1",
    "decoder.conv_in": "decoder.conv1",
    "encoder.norm_out": "encoder.head.0",
    "decoder.norm_out": "decoder.head.0",
    "encoder.conv_out": "encoder.head.2",
    "decoder.conv_out": "decoder.head.2",
}
_RESNET = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_LEVEL = re.compile(r"(encoder\.down|decoder\.up)_blocks\.(\d+)\.(?:(resnets)\.(\d+)\.|((?:down|up)samplers?(?:\.0)?)\.)?(.+)")
_MIDDLE = re.compile(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d+)\.(.+)")


def to_original(key: str, num_res_blocks: int, is_residual: bool) -> str | None:
    """Return the original Wan name of a diffusers key, or None for a key that is not of this model."""
    module, _, leaf = key.rpartition(".")
    if module in _ENDS:
        return f"{_ENDS[module]}.{leaf}"
    if middle := _MIDDLE.fullmatch(key):
        half, kind, index, rest = middle.groups()
        position = 2 * int(index) + (kind == "attentions")
        return f"{half}.middle.{position}.{_resnet(rest) if kind == 'resnets' else rest}"
    level = _LEVEL.fullmatch(key)
    if level is None:
        return None
    side, block, resnets, resnet, sampler, rest = level.groups()
    samples = f"{side}samples"
    if side == "encoder.down" and not is_residual:  # a flat list in both
        return f"{samples}.{block}.{_resnet(rest)}"
    per_level = num_res_blocks + (side == "decoder.up")
    layer = int(resnet) if resnets else per_level
    name = _resnet(rest) if resnets else rest
    if not resnets and not sampler:
        return None
    if is_residual:
        return f"{samples}.{block}.{samples.split('.')[1]}.{layer}.{name}"
    return f"{samples}.{int(block) * (per_level + 1) + layer}.{name}"


def is_original(keys: Iterable[str]) -> bool:
    """Say whether these are the names of an original Wan VAE."""
    return "decoder.middle.0.residual.0.gamma" in set(keys)


def is_diffusers(keys: Iterable[str]) -> bool:
    """Say whether these are the names of a diffusers Wan VAE."""
    return {"decoder.mid_block.resnets.0.norm1.gamma", "post_quant_conv.weight"} <= set(keys)


def infer_config(shapes: Shapes, where: str) -> dict[str, Any]:
    """Return the diffusers configuration that the shapes (under either set of names) belong to.

    The latents' mean and std are not in the weights: they are known for the two released VAEs only.
    """
    if not is_original(shapes):
        shapes = _under_original_names(shapes)
    z_dim = shapes["conv2.weight"][0]
    known = {16: WAN21_VAE, 48: WAN22_VAE}.get(z_dim)
    if known is None:
        raise CheckpointError(
            f"{where} does not say how its latents are distributed.",
            why=f"it has {z_dim} latent channels; mean and std are known for the released VAEs of 16 and 48 only.",
            fix="Put the VAE's config.json, with latents_mean and latents_std, beside the file.",
        )
    is_residual = any(re.match(r"encoder\.downsamples\.\d+\.downsamples\.", key) for key in shapes)
    levels = _levels(shapes, is_residual)
    base_dim = shapes["encoder.conv1.weight"][0]
    in_channels = shapes["encoder.conv1.weight"][1]
    decoder_base_dim = shapes["decoder.head.0.gamma"][0]
    patch_size = round((in_channels / 3) ** 0.5)
    return {
        **known,
        "base_dim": base_dim,
        "decoder_base_dim": None if decoder_base_dim == base_dim else decoder_base_dim,
        "z_dim": z_dim,
        "dim_mult": [channels // base_dim for channels, _ in levels],
        "num_res_blocks": _num_res_blocks(shapes, is_residual),
        "temperal_downsample": [bool(is_temporal) for _, is_temporal in levels[:-1]],
        "is_residual": is_residual,
        "in_channels": in_channels,
        "out_channels": shapes["decoder.head.2.weight"][0],
        "patch_size": patch_size if patch_size > 1 else None,
        "scale_factor_spatial": patch_size * 2 ** (len(levels) - 1),
        "scale_factor_temporal": 2 ** sum(bool(is_temporal) for _, is_temporal in levels),
    }


def _resnet(rest: str) -> str:
    module, _, leaf = rest.rpartition(".")
    return f"{_RESNET[module]}.{leaf}" if module in _RESNET else rest


def _levels(shapes: Shapes, is_residual: bool) -> list[tuple[int, bool]]:
    """Return each level's channels and whether its end halves the time."""
    levels: list[tuple[int, bool]] = []
    channels = 0
    for layer in _encoder_layers(shapes, is_residual):
        if f"{layer}.residual.6.weight" in shapes:
            channels = shapes[f"{layer}.residual.6.weight"][0]
        elif f"{layer}.resample.1.weight" in shapes:
            levels.append((channels, f"{layer}.time_conv.weight" in shapes))
    return [*levels, (channels, False)]


def _num_res_blocks(shapes: Shapes, is_residual: bool) -> int:
    return next(
        index for index, layer in enumerate(_encoder_layers(shapes, is_residual)) if f"{layer}.residual.6.weight" not in shapes
    )


def _encoder_layers(shapes: Shapes, is_residual: bool) -> list[str]:
    """Return the names of the encoder's layers in order, whether in one list or in one list a level."""
    modules = {".".join(key.split(".")[: 5 if is_residual else 3]) for key in shapes if key.startswith("encoder.downsamples.")}
    return sorted(modules, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])


def _under_original_names(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    is_residual = "encoder.down_blocks.0.resnets.0.conv1.weight" in shapes
    pattern = "encoder.down_blocks.0.resnets.{}.conv1.weight" if is_residual else "encoder.down_blocks.{}.conv1.weight"
    num_res_blocks = next(index for index in count() if pattern.format(index) not in shapes)
    names = {key: to_original(key, num_res_blocks, is_residual) for key in shapes}
    return {name: shapes[key] for key, name in names.items() if name is not None}
