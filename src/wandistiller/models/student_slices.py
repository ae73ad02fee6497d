"""Which part of each of the teacher's tensors a narrower student takes.

Every dimension of a Wan tensor runs along an axis that it shares with others: the residual stream's channels, a block's
heads or feed-forward units, the hidden units of an embedder. One choice an axis, used wherever the axis appears, keeps the
network consistent. Choices by importance read the teacher's matrices once, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from wandistiller.errors import UsageError, nearest

Read = Callable[[str], Tensor]
"""Gives one of the teacher's tensors under its diffusers name."""
Indices = Mapping[str, Tensor]
"""What is kept of each axis that shrinks."""

# The axes of a module's weight; its bias, if any, has the first. Those that begin with a dot are a block's own.
_MODULES: Mapping[str, tuple[str | None, ...]] = {
    "patch_embedding": ("residual", None),
    "condition_embedder.time_embedder.linear_1": ("time units", "frequencies"),
    "condition_embedder.time_embedder.linear_2": ("residual", "time units"),
    "condition_embedder.time_proj": ("modulation", "residual"),
    "condition_embedder.text_embedder.linear_1": ("text units", None),
    "condition_embedder.text_embedder.linear_2": ("text", "text units"),
    "condition_embedder.image_embedder.norm1": (None,),
    "condition_embedder.image_embedder.ff.net.0.proj": (None, None),
    "condition_embedder.image_embedder.ff.net.2": ("image", None),
    "condition_embedder.image_embedder.norm2": ("image",),
    "condition_embedder.image_embedder.pos_embed": (None, None, None),
    "proj_out": (None, "residual"),
    "scale_shift_table": (None, None, "residual"),
}
_BLOCK_MODULES: Mapping[str, tuple[str | None, ...]] = {
    "scale_shift_table": (None, None, "residual"),
    "attn1.to_q": (".self heads", "residual"),
    "attn1.to_k": (".self heads", "residual"),
    "attn1.to_v": (".self heads", "residual"),
    "attn1.norm_q": (".self heads",),
    "attn1.norm_k": (".self heads",),
    "attn1.to_out.0": ("residual", ".self heads"),
    "attn2.to_q": (".cross heads", "residual"),
    "attn2.to_k": (".cross heads", "text"),
    "attn2.to_v": (".cross heads", "text"),
    "attn2.add_k_proj": (".cross heads", "image"),
    "attn2.add_v_proj": (".cross heads", "image"),
    "attn2.norm_q": (".cross heads",),
    "attn2.norm_k": (".cross heads",),
    "attn2.norm_added_k": (".cross heads",),
    "attn2.to_out.0": ("residual", ".cross heads"),
    "norm2": ("residual",),
    "ffn.net.0.proj": (".units", "residual"),
    "ffn.net.2": ("residual", ".units"),
}
_BLOCK = re.compile(r"(blocks\.\d+)\.(.+)")
_NUM_MODULATIONS = 6


def _most_important(scores: Tensor, count: int) -> Tensor:
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def _evenly(scores: Tensor, count: int) -> Tensor:
    return torch.arange(count) * len(scores) // count


def _first(scores: Tensor, count: int) -> Tensor:
    return torch.arange(count)


CHOICES: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "importance": _most_important,
    "even": _evenly,
    "first": _first,
}
"""Ways to choose heads, channels and units: given their scores and how many, return which, in ascending order."""


def axes_of(key: str) -> tuple[str | None, ...]:
    """Return the axis of each dimension of a tensor, from the first on; None, or nothing, for those that are never cut."""
    block = _BLOCK.fullmatch(key)
    prefix, inner, table = (block.group(1), block.group(2), _BLOCK_MODULES) if block else ("", key, _MODULES)
    module = inner if inner in table else inner.rpartition(".")[0]
    axes = table[module][:1] if inner.endswith(".bias") else table[module]
    return tuple(prefix + axis if axis and axis.startswith(".") else axis for axis in axes)


def take(tensor: Tensor, key: str, indices: Indices) -> Tensor:
    """Return the student's part of one of the teacher's tensors."""
    for dimension, axis in enumerate(axes_of(key)):
        if axis is not None and axis in indices:
            tensor = tensor.index_select(dimension, indices[axis])
    return tensor


def head_channels(teacher: int, student: int) -> Tensor | None:
    """Return which channels a head of ``student`` takes of one of ``teacher``, or None where it cannot be cut out of it.

    The rotary embedding turns pairs of channels, a third of them for each of time, height and width, each pair at a frequency
    of its own. A student's pair takes the teacher's pair of the nearest frequency on the same axis: at half the size, exactly
    its own. Where queries and keys lie matters for nothing else, so values and text take the same channels.
    """
    start, chosen = 0, []
    for ours, theirs in zip(_rotary_sections(student), _rotary_sections(teacher), strict=True):
        if ours > theirs:
            return None
        pairs = start + 2 * _nearest_frequencies(theirs // 2, ours // 2)
        chosen.append(torch.stack([pairs, pairs + 1], dim=1).flatten())
        start += theirs
    return torch.cat(chosen)


def choose_indices(
    read: Read, keys: Iterable[str], teacher: Mapping[str, Any], student: Mapping[str, Any], choice: str
) -> dict[str, Tensor]:
    """Return what to keep of every axis along which the student is smaller.

    ``keys`` are the teacher's tensors that the student will take something of; only these count for importance.
    """
    if choice not in CHOICES:
        what = f"There is no way '{choice}' to choose channels{nearest(choice, CHOICES)}"
        raise UsageError(what, fix=f"Choose one of {', '.join(CHOICES)}.")
    keys = list(keys)
    wanted = {axis: _sizes(axis, teacher, student) for key in keys for axis in axes_of(key) if axis}
    given = ("modulation", "frequencies")  # by the choice for another axis, and by the frequencies themselves
    ranked = {axis: sizes for axis, sizes in wanted.items() if sizes[1] < sizes[0] and axis not in given}
    scores = _score(read, keys, set(ranked)) if choice == "importance" else {}
    pick = CHOICES[choice]
    indices = {}
    for axis, (size, count) in ranked.items():
        score = scores.get(axis, torch.zeros(size))
        if axis.endswith("heads"):
            indices[axis] = _head_indices(score, teacher, student, pick)
        else:
            indices[axis] = pick(score, count)
    if "residual" in indices:
        width = _width(teacher)
        indices["modulation"] = torch.cat([indices["residual"] + part * width for part in range(_NUM_MODULATIONS)])
    ours, theirs = student["freq_dim"] // 2, teacher["freq_dim"] // 2
    if ours < theirs:
        frequencies = _nearest_frequencies(theirs, ours)
        indices["frequencies"] = torch.cat([frequencies, frequencies + theirs])  # cosines, then sines
    return indices


def _score(read: Read, keys: Iterable[str], axes: set[str]) -> dict[str, Tensor]:
    """Return the importance of each place on the axes, from the squared norms of the rows and columns that belong to it.

    A channel counts for all that is written to it and read from it; a hidden unit for what goes in times what comes out; a
    head for what comes out of it.
    """
    scores: dict[str, Tensor] = {}
    for key in keys:
        places = [(place, axis) for place, axis in enumerate(axes_of(key)) if axis in axes]
        if not key.endswith(".weight") or len(axes_of(key)) < 2 or not places:
            continue
        squares = read(key).float().square()
        for place, axis in places:
            if axis.endswith("heads") and place == 0:
                continue
            norms = squares.sum([other for other in range(squares.ndim) if other != place], dtype=torch.float64)
            if axis not in scores:
                scores[axis] = norms
            else:
                scores[axis] = scores[axis] * norms if axis.endswith("units") else scores[axis] + norms
    return scores


def _head_indices(
    scores: Tensor, teacher: Mapping[str, Any], student: Mapping[str, Any], pick: Callable[[Tensor, int], Tensor]
) -> Tensor:
    size = teacher["attention_head_dim"]
    channels = head_channels(size, student["attention_head_dim"])
    assert channels is not None  # attention that cannot be cut out is not among the keys
    per_head = scores.reshape(-1, size)[:, channels].sum(1)
    heads = pick(per_head, student["num_attention_heads"])
    return (heads[:, None] * size + channels).flatten()


def _sizes(axis: str, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> tuple[int, int]:
    if axis == "frequencies":
        return teacher["freq_dim"], student["freq_dim"]
    if axis.endswith(".units"):
        return teacher["ffn_dim"], student["ffn_dim"]
    return _width(teacher), _width(student)


def _rotary_sections(size: int) -> tuple[int, int, int]:
    side = 2 * (size // 6)
    return size - 2 * side, side, side


def _nearest_frequencies(total: int, count: int) -> Tensor:
    """Return which of ``total`` frequencies b**(-i / total) are nearest to ``count`` frequencies b**(-i / count)."""
    return (torch.arange(count) * total * 2 + count) // (2 * count)


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])
