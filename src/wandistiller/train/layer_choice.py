"""Which of the teacher's layers matter most: how much each changes what goes through it, on a few of the run's own questions.

What is measured is kept in the run's folder, so that a run that is resumed has the student that it began with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller.data.cache_files import fingerprint_weights
from wandistiller.data.loader import sample_generator
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import CheckpointError, UsageError
from wandistiller.files import complete_or_absent
from wandistiller.flow.path import interpolate
from wandistiller.models.latents import num_tokens
from wandistiller.models.stored import StoredModel
from wandistiller.models.student_layers import block_influence
from wandistiller.terminal import say
from wandistiller.train.teacher import Teaches

FILE = "layer_scores.json"
_NUM_QUESTIONS = 8
_MOST_TRIES = 1024
_MOST_NUMBERS = 2**28
"""Of hidden states at a time: where clips are long, the teacher is asked about some of its blocks, then about others."""


def score_layers(
    folder: Path,
    stored: StoredModel,
    teacher: Teaches,
    samples: Any,
    ranks: Ranks,
    *,
    device: torch.device,
    low: float = 0.0,
    seed: int = 0,
) -> Sequence[float]:
    """Return a score of each of the teacher's layers; all ranks call this at the same time, with the same samples.

    ``low`` is the least sigma that the transformer ``stored`` is for. Samples are read as training reads them.
    """
    path = folder / FILE
    teacher_is = fingerprint_weights(stored.weights, stored.names)[:16]
    kept = ranks.from_first(_read(path, teacher_is) if ranks.is_first and path.is_file() else None)
    if kept is not None:
        return list(kept)
    found = [_influences(stored, teacher, *question) for question in _questions(samples, device, low, seed)]
    scores: list[float] = ranks.from_first([sum(each) / len(found) for each in zip(*found, strict=True)])
    if ranks.is_first:
        with complete_or_absent(path) as partial:
            content = {"teacher": teacher_is, "questions": len(found), "scores": scores}
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        say("Influence of the teacher's layers: " + ", ".join(f"{layer} {score:.3f}" for layer, score in enumerate(scores)))
    return scores


def _questions(samples: Any, device: torch.device, low: float, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield noisy latents, sigmas and texts, one sample each, of those that the transformer is for."""
    chance = torch.Generator().manual_seed(seed)
    num_found = 0
    for attempt in range(_MOST_TRIES):
        index = int(torch.randint(len(samples), (1,), generator=chance))
        found = {name: tensor[None] for name, tensor in samples.read(index, sample_generator(seed, attempt, index)).items()}
        sigma = found["sigma"]
        if float(sigma) < low:
            continue
        noisy = found["noisy"] if "noisy" in found else interpolate(found["latents"], found["noise"], sigma)
        yield noisy.float().to(device), sigma.float().to(device), found["text"].float().to(device)
        num_found += 1
        if num_found == _NUM_QUESTIONS:
            return
    if not num_found:
        raise UsageError(
            f"The teacher's layers cannot be scored: of {_MOST_TRIES} questions none has a sigma of {low} or more.",
            fix="Take --layer-choice spread.",
        )


def _influences(stored: StoredModel, teacher: Teaches, noisy: Tensor, sigma: Tensor, text: Tensor) -> list[float]:
    """Return how much each block changes the hidden states of a question."""
    config = stored.config
    size = num_tokens(config, noisy.shape) * config["num_attention_heads"] * config["attention_head_dim"]
    found = []
    before = _embedded(stored, noisy)
    layers, together = range(config["num_layers"]), max(1, _MOST_NUMBERS // size)
    for blocks in (layers[first : first + together] for first in layers[::together]):
        for after in teacher.answer(noisy, sigma, text, blocks=blocks).features:
            found.append(block_influence(before.cpu(), after.cpu()))
            before = after
    return found


def _embedded(stored: StoredModel, noisy: Tensor) -> Tensor:
    """Return what the first block is given (1, tokens, width)."""
    weight, bias = (stored.read(f"patch_embedding.{name}", torch.float32) for name in ("weight", "bias"))
    embedded = torch.nn.functional.conv3d(noisy.cpu(), weight, bias, stride=tuple(stored.config["patch_size"]))
    return embedded.flatten(2).transpose(1, 2)


def _read(path: Path, teacher_is: str) -> list[float]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured_of, scores = content["teacher"], [float(score) for score in content["scores"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read.", why=str(error), fix="Remove it; it is measured again.") from error
    if measured_of != teacher_is:
        raise CheckpointError(f"{path} is of another teacher.", fix="Give another --output-dir, or remove it.")
    return scores
