"""The two names of every tensor of a Wan transformer, and the configuration that its shapes tell.

Original Wan files and ComfyUI single files share one set of names; diffusers has another. The rules below are written
from diffusers to original, one for each module; the way back is the same rules read the other way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from wandistiller.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

_PAIRS: tuple[tuple[str, str], ...] = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
    ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
    ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
    ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
    ("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
    ("patch_embedding", "patch_embedding"),
    ("proj_out", "head.head"),
    ("scale_shift_table", "head.modulation"),
)
# Inside a block. The original counts its norms in another order than they are used: 1, 3, 2.
_BLOCK_PAIRS: tuple[tuple[str, str], ...] = (
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("norm2", "norm3"),
    ("norm3", "norm2"),
    ("scale_shift_table", "modulation"),
)
_ATTENTION_PAIRS: tuple[tuple[str, str], ...] = (
    ("to_q", "q"),
    ("to_k", "k"),
    ("to_v", "v"),
    ("to_out.0", "o"),
    ("norm_q", "norm_q"),
    ("norm_k", "norm_k"),
    ("add_k_proj", "k_img"),
    ("add_v_proj", "v_img"),
    ("norm_added_k", "norm_k_img"),
)
_BLOCK = re.compile(r"(blocks\.\d+)\.(.+)")


def to_original(key: str) -> str | None:
    """Return the original Wan name of a diffusers key, or None for a key that is not of this model."""
    return _translate(key, source=0)


def to_diffusers(key: str) -> str | None:
    """Return the diffusers name of an original Wan key, or None for a key that is not of this model."""
    return _translate(key, source=1)


def is_original(keys: Iterable[str]) -> bool:
    """Say whether these are the names of an original Wan transformer."""
    return "head.modulation" in set(keys)


def is_diffusers(keys: Iterable[str]) -> bool:
    """Say whether these are the names of a diffusers Wan transformer."""
    return {"scale_shift_table", "condition_embedder.time_proj.weight"} <= set(keys)


def infer_config(shapes: Shapes, where: str, heads: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the diffusers configuration that the shapes (under diffusers names) belong to.

    One thing is not in the shapes: how the width divides into heads. All released Wan models have heads of 128; for
    another, ``heads`` holds ``num_attention_heads`` and ``attention_head_dim``.
    """
    patch = shapes["patch_embedding.weight"]
    width = patch[0]
    if width % 128 and not heads:
        raise CheckpointError(
            f"{where} does not say how many attention heads it has.",
            why=f"its width is {width}, which is not made of heads of 128 as in every released Wan.",
            fix="Put the model's config.json beside the file.",
        )
    patch_size = list(patch[2:])
    image_embedder = "condition_embedder.image_embedder"
    return {
        "patch_size": patch_size,
        **(heads or {"num_attention_heads": width // 128, "attention_head_dim": 128}),
        "in_channels": patch[1],
        "out_channels": shapes["proj_out.weight"][0] // (patch_size[0] * patch_size[1] * patch_size[2]),
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": 1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("blocks.")),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "qk_norm": "rms_norm_across_heads",
        "eps": (heads or {}).get("eps", 1e-6),
        "image_dim": shapes[f"{image_embedder}.norm1.weight"][0] if f"{image_embedder}.norm1.weight" in shapes else None,
        "added_kv_proj_dim": shapes.get("blocks.0.attn2.add_k_proj.weight", (None, None))[1],
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": shapes.get(f"{image_embedder}.pos_embed", (None, None))[1],
    }


def config_from_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the few fields that an original Wan ``config.json`` has and shapes have not."""
    if "dim" not in config or "num_heads" not in config:
        return {}
    fields: dict[str, Any] = {
        "num_attention_heads": config["num_heads"],
        "attention_head_dim": config["dim"] // config["num_heads"],
    }
    if "eps" in config:
        fields["eps"] = config["eps"]
    return fields


def _translate(key: str, source: int) -> str | None:
    block = _BLOCK.fullmatch(key)
    if block is None:
        return _rename(key, _PAIRS, source)
    inner = _rename(block.group(2), _BLOCK_PAIRS, source)
    if inner is None:
        return None
    attention = re.match(r"(attn[12]|self_attn|cross_attn)\.(.+)", inner)
    if attention:
        part = _rename(attention.group(2), _ATTENTION_PAIRS, source)
        inner = part and f"{attention.group(1)}.{part}"
    return inner and f"{block.group(1)}.{inner}"


def _rename(key: str, pairs: tuple[tuple[str, str], ...], source: int) -> str | None:
    for pair in pairs:
        name = pair[source]
        if key == name or key.startswith(name + "."):
            return pair[1 - source] + key[len(name) :]
    return None
