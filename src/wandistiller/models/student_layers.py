"""Which of the teacher's layers a student begins with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wandistiller.errors import UsageError


def spread_layers(total: int, count: int) -> tuple[int, ...]:
    """Return ``count`` of ``total`` layers, evenly spread, the first and the last among them; the first alone for one."""
    _check_count(total, count)
    if count == 1:
        return (0,)
    # Halves are rounded up. Neighbours lie at least one apart, so none comes twice.
    return tuple((2 * index * (total - 1) + count - 1) // (2 * (count - 1)) for index in range(count))


def rank_layers(scores: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the ``count`` layers of the highest scores in their order, always with the first and the last.

    Those two turn latents into what all others work on, and back, whatever their score; for a single layer the score alone
    counts. Of equal scores the earlier layer is kept.
    """
    total = len(scores)
    _check_count(total, count)
    if not torch.tensor(scores, dtype=torch.float64).isfinite().all():
        raise UsageError("Some of the layers' scores are not finite.", fix="Measure them again, on latents that are finite.")
    kept = {0, total - 1} if count > 1 else set()
    by_score = sorted(set(range(total)) - kept, key=lambda layer: (-scores[layer], layer))
    return tuple(sorted(kept | set(by_score[: count - len(kept)])))


def block_influence(hidden_in: Tensor, hidden_out: Tensor) -> float:
    """Return how much a block changes what goes through it: 1 - the mean cosine similarity of tokens (..., width)."""
    if hidden_in.shape != hidden_out.shape:
        raise ValueError(f"a block's input {tuple(hidden_in.shape)} and output {tuple(hidden_out.shape)} differ in shape")
    similarity = torch.nn.functional.cosine_similarity(hidden_in.double(), hidden_out.double(), dim=-1)
    return 1.0 - float(similarity.mean())


def _check_count(total: int, count: int) -> None:
    if not 1 <= count <= total:
        raise UsageError(
            f"A student of {count} layers cannot start from a teacher of {total}.",
            fix=f"Choose a depth from 1 to {total}.",
        )
