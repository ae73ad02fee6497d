"""What blocks of a model give, and how far a student's are from its teacher's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def tapped(model: nn.Module, blocks: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collect what some of a model's blocks give while the block runs, in their order."""
    found: list[Tensor] = []
    layers = model.get_submodule("blocks")

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layers[index].register_forward_hook(note) for index in blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def matched_blocks(num_student: int, num_teacher: int) -> list[int]:
    """Return the blocks of a teacher that those of a student follow where nothing else is known: evenly spread."""
    return [round(index * (num_teacher - 1) / max(num_student - 1, 1)) for index in range(num_student)]


def feature_error(mine: Tensor, theirs: Tensor, channels: Tensor | None) -> Tensor:
    """Return the mean over samples of the squared error, each relative to the square of what is wanted.

    By sample, so that it does not depend on who else is in the batch. ``channels`` are those of the teacher's that the student
    has; None for all.
    """
    target = (theirs if channels is None else theirs[..., channels.to(theirs.device)]).float()
    errors, sizes = (each.square().flatten(1).mean(1) for each in (mine.float() - target, target))
    return (errors / sizes.clamp_min(1e-8)).mean()
