"""The named sizes of Wan, as diffusers configurations, and what each is usually sampled with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from wandistiller.errors import UsageError, nearest

Config = Mapping[str, Any]

WAN21_LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
WAN21_LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip
WAN22_LATENTS_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
WAN22_LATENTS_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip


def _frozen(**values: Any) -> Config:
    return MappingProxyType(values)


def _transformer(heads: int, ffn: int, layers: int, channels: int = 16, **more: Any) -> Config:
    base: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "in_channels": channels,
        "out_channels": channels,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": ffn,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    }
    return _frozen(**{**base, **more})


WAN21_VAE = _frozen(
    base_dim=96,
    decoder_base_dim=None,
    z_dim=16,
    dim_mult=[1, 2, 4, 4],
    num_res_blocks=2,
    attn_scales=[],
    temperal_downsample=[False, True, True],
    dropout=0.0,
    latents_mean=list(WAN21_LATENTS_MEAN),
    latents_std=list(WAN21_LATENTS_STD),
    is_residual=False,
    in_channels=3,
    out_channels=3,
    patch_size=None,
    scale_factor_temporal=4,
    scale_factor_spatial=8,
)
WAN22_VAE = _frozen(
    **{
        **WAN21_VAE,
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "latents_mean": list(WAN22_LATENTS_MEAN),
        "latents_std": list(WAN22_LATENTS_STD),
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
    }
)
# The tiny VAE compresses like the 16-channel one, 8x in space and 4x in time, with 8 channels and no statistics yet.
TINY_VAE = _frozen(
    **{
        **WAN21_VAE,
        "base_dim": 8,
        "z_dim": 8,
        "num_res_blocks": 1,
        "latents_mean": [0.0] * 8,
        "latents_std": [1.0] * 8,
    }
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One named Wan: its parts and the settings it is usually sampled with."""

    name: str
    transformer: Config
    vae: Config
    boundary: float | None = None
    """Sigma at which the second, low-noise expert takes over; None where there is one transformer."""
    expand_timesteps: bool = False
    """Whether every token has a timestep of its own (the 5B does image-to-video that way)."""
    shift: float = 5.0
    guidance: float = 5.0
    guidance_2: float | None = None
    width: int = 832
    height: int = 480
    frames: int = 81
    fps: int = 16


HUB_IDS: Mapping[str, str] = MappingProxyType(
    {
        "wan2.1-1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "wan2.1-14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "wan2.1-i2v-14b": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        "wan2.2-5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "wan2.2-a14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "wan2.2-i2v-a14b": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    }
)
"""Where the weights of a size are."""
SIZES: Mapping[str, Size] = MappingProxyType(
    {
        size.name: size
        for size in (
            Size(name="wan2.1-1.3b", transformer=_transformer(12, 8960, 30), vae=WAN21_VAE),
            Size(name="wan2.1-14b", transformer=_transformer(40, 13824, 40), vae=WAN21_VAE),
            Size(
                name="wan2.2-5b",
                transformer=_transformer(24, 14336, 30, 48),
                vae=WAN22_VAE,
                expand_timesteps=True,
                width=1280,
                height=704,
                frames=121,
                fps=24,
            ),
            Size(
                name="wan2.2-a14b",
                transformer=_transformer(40, 13824, 40),
                vae=WAN21_VAE,
                boundary=0.875,
                shift=12.0,
                guidance=4.0,
                guidance_2=3.0,
                width=1280,
                height=720,
            ),
            Size(
                name="wan2.1-i2v-14b",
                transformer=_transformer(40, 13824, 40, in_channels=36, image_dim=1280, added_kv_proj_dim=5120),
                vae=WAN21_VAE,
            ),
            Size(
                name="wan2.2-i2v-a14b",
                transformer=_transformer(40, 13824, 40, in_channels=36),
                vae=WAN21_VAE,
                boundary=0.9,
                guidance=3.5,
                width=1280,
                height=720,
            ),
            # Large enough to learn the procedural world.
            Size(
                name="tiny-world",
                transformer=_transformer(6, 576, 8, 8, attention_head_dim=32, text_dim=128, freq_dim=64),
                vae=TINY_VAE,
                shift=3.0,
                guidance=1.0,
                width=64,
                height=64,
                frames=9,
                fps=8,
            ),
            # Of random weights, for trying things out.
            Size(
                name="tiny",
                transformer=_transformer(4, 256, 3, 8, attention_head_dim=24, text_dim=32, freq_dim=64),
                vae=TINY_VAE,
                shift=3.0,
                guidance=2.0,
                width=64,
                height=64,
                frames=9,
                fps=8,
            ),
        )
    }
)


def find_size(name: str) -> Size:
    """Return the size called ``name``; raise ``UsageError`` with the nearest name for another."""
    if name not in SIZES:
        raise UsageError(f"There is no Wan size '{name}'{nearest(name, SIZES)}", fix=f"Choose one of {', '.join(SIZES)}.")
    return SIZES[name]


def usual_size(vae_config: Config) -> Size:
    """Return the size whose models have such a VAE, for what they are usually sampled at."""
    known = [size for size in SIZES.values() if size.vae["z_dim"] == vae_config["z_dim"]]
    return known[0] if known else SIZES["wan2.1-1.3b"]
