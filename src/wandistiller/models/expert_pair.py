"""The transformers of a pipeline as they lie on disk: one, or two experts of which one takes over from the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wandistiller.errors import CheckpointError
from wandistiller.models.stored import TRANSFORMER, StoredModel, inspect_checkpoint

_SHARED = ("in_channels", "out_channels", "patch_size", "text_dim", "image_dim", "pos_embed_seq_len", "rope_max_seq_len")
"""What both are given, and give. Depth and width are each one's own."""


def inspect_experts(paths: Sequence[Path]) -> list[StoredModel]:
    """Check one transformer or two without reading weights; raise ``CheckpointError`` for two that do not belong together."""
    stored = [inspect_checkpoint(path, TRANSFORMER) for path in paths]
    first, last = stored[0].config, stored[-1].config
    differing = [name for name in _SHARED if first[name] != last[name]]
    if differing:
        raise CheckpointError(
            f"The two experts {paths[0]} and {paths[-1]} do not belong together.",
            why="; ".join(f"{name} is {first[name]} in one and {last[name]} in the other" for name in differing) + ".",
            fix="Give two experts of one model.",
        )
    return stored
