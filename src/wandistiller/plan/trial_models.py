"""Models of a trial: with random weights, where their placement has them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from wandistiller.errors import UsageError
from wandistiller.memory.activations import prepare_blocks
from wandistiller.memory.device_map import on_disk
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.placement import FromDisk, Placed, Placement, Subject, find_placement
from wandistiller.memory.spread import Custom
from wandistiller.memory.stage import Placing
from wandistiller.memory.subjects import choose_placement
from wandistiller.memory.uses import Use
from wandistiller.models.random_weights import RandomWeights, write_weights
from wandistiller.models.weight_files import Entry, open_weights
from wandistiller.train.optimisation import Optimises
from wandistiller.units import Bytes


class Ends(ExitStack):
    """What is undone when a trial is over."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[Path] = []
        """Those that a step is to find on the disk, not in the system's cache."""
        self.optimisations: list[Optimises] = []
        self.callback(self.optimisations.clear)

    @property
    def loss_scales(self) -> list[float]:
        """What losses are multiplied by; less than before where a step was left out."""
        return [each.loss_scale for each in self.optimisations]


def build_placed(use: Use, placing: Placing, device: torch.device, ends: Ends) -> tuple[Placed, nn.Module]:
    """Build a model with random weights where it belongs, in the order in which a run does it."""
    model = use.build(use.num_blocks)
    blocks = list(model.get_submodule("blocks").children())
    prepare_blocks(blocks, device, ends, compiled=use.is_compiled, policy=use.policy, to_host=use.to_host)
    trains = use.trains == "everything"
    placement = choose_placement(
        placing.name,
        resident=placing.resident,
        eight_bit=placing.eight_bit,
        train=trains,
        device_map=placing.device_map,
        max_memory=placing.max_memory,
    )
    return attached(placement, Subject(model=model, blocks=blocks), device, ends, use.stored_dtype), model


def attached(
    placement: Placement, subject: Subject, device: torch.device, ends: Ends, stored_dtype: torch.dtype | None = None
) -> Placed:
    """Put a model on the meta device where its placement has it, with random weights."""
    weights = RandomWeights(subject.model)
    subject = replace(subject, read=weights)
    read = _names_to_read(placement, subject.model)
    placed = placement.attach(_on_disk(subject, read, stored_dtype, ends) if read else subject, device)
    if placed.stream is not None:
        ends.callback(placed.stream.close)
    return placed


def filled(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model on the meta device random weights."""
    find_placement("gpu").attach(Subject(model=model, blocks=[], read=RandomWeights(model)), device)
    return model


def _names_to_read(placement: Placement, model: nn.Module) -> list[str]:
    """Return what a step reads from files: all that is frozen, or what a map has there."""
    if isinstance(placement, Custom):
        return on_disk(model, placement.device_map(Subject(model=model, blocks=[])))
    is_streamed = isinstance(placement, FromDisk)
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad] if is_streamed else []


def _on_disk(subject: Subject, names: Sequence[str], dtype: torch.dtype | None, ends: Ends) -> Subject:
    """Write tensors of a model to files that are gone with the trial, in the ``dtype`` that the user's have, if another."""
    folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="wandistiller-")))
    weights, used = RandomWeights(subject.model, dtype), dict(named_tensors(subject.model))
    needed, free = Bytes(sum(map(weights.num_bytes, names))), Bytes(shutil.disk_usage(folder).free)
    if needed > free:
        raise UsageError(
            f"A trial of weights on disk writes {needed} to {folder.parent}, where {free} are free.",
            fix="Let TMPDIR name a folder on the disk that is to be tried, with room.",
        )
    ends.files += write_weights(weights, names, folder)
    os.sync()
    stored = open_weights(folder)
    dtypes = {name: used[name].dtype for name in names}

    def locate(name: str) -> Entry | None:
        return stored.entries[name] if name in dtypes and stored.entries[name].dtype == dtypes[name] else None

    def read(name: str) -> Tensor:
        assert subject.read is not None
        return stored.read(name).to(dtypes[name]) if name in dtypes else subject.read(name)

    return replace(subject, locate=locate, read=read)
