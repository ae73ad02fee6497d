"""Models as placements want them: still empty, with ways to get their weights from the user's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from wandistiller.memory.placement import Placement, Subject
from wandistiller.memory.placements import find_placement
from wandistiller.models.stored import StoredModel, build_empty
from wandistiller.units import Bytes


def stored_subject(
    stored: StoredModel,
    dtype: torch.dtype,
    *,
    on_read: Callable[[], object] = lambda: None,
    model_class: type[nn.Module] | None = None,
) -> Subject:
    """Return a frozen model on the meta device with its files behind it; ``on_read`` is told of every tensor read."""

    def read(name: str) -> Tensor:
        on_read()
        return stored.read_for(name, dtype)

    model = build_empty(stored.architecture, stored.config, model_class, dtype=dtype).requires_grad_(False)
    return Subject(
        model=model,
        blocks=list(model.blocks),
        read=read,
        locate=lambda name: stored.locate(name, dtype),
        key=f"{stored.identity} {dtype}",
    )


def choose_placement(
    name: str,
    *,
    resident: int | Literal["auto"] = "auto",
    eight_bit: bool = False,
    train: bool = False,
    device_map: Path | None = None,
    max_memory: Mapping[int | str, int] | None = None,
    headroom: Bytes | None = None,
) -> Placement:
    """Return a placement by name with those of the options that concern it; ``train`` is for whole blocks, not adapters."""
    match name:
        case "auto":
            return find_placement(name, headroom=headroom)
        case "offload":
            # Streams of 8 bits do not measure how many blocks should stay; a number that is given counts.
            kept = 0 if eight_bit and resident == "auto" else resident
            return find_placement(name, resident=kept, quantise=eight_bit, train=train)
        case "custom":
            return find_placement(name, map=device_map)
        case "balanced" | "sequential":
            return find_placement(name, max_memory=max_memory)
        case _:
            return find_placement(name)
