"""What is to be known of a student beside its weights, in small files of its pipeline: diffusers' own have no place for it.

How much of a caption it was taught with, and what guidance it has learnt, so that it is not guided a second time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wandistiller.errors import CheckpointError
from wandistiller.models.text_padding import TEXT_TOKENS

_TEXT_LIMIT, _GUIDANCE = "text_max_length", "guidance_scale"
_FILES = {_TEXT_LIMIT: "text_max_length.json", _GUIDANCE: "learnt_guidance.json"}
FACT_FILES = tuple(_FILES.values())


def write_text_limit(folder: Path, max_tokens: int) -> None:
    """Write the limit into a pipeline's folder; one that takes whole captions has none."""
    if max_tokens < TEXT_TOKENS:
        _write(folder, _TEXT_LIMIT, max_tokens)


def read_text_limit(folder: Path) -> int:
    """Return after how many tokens a pipeline's captions are cut off."""
    found = _read(folder, _TEXT_LIMIT)
    if found is None:
        return TEXT_TOKENS
    if not isinstance(found, int) or not 1 <= found <= TEXT_TOKENS:
        path = folder / _FILES[_TEXT_LIMIT]
        raise CheckpointError(f"{path} says {found!r}.", fix=f"Write a whole number from 1 to {TEXT_TOKENS}.")
    return found


def write_learnt_guidance(folder: Path, scale: float | None) -> None:
    """Write the teacher's guidance into a student's folder; None for one that is guided like any other model."""
    if scale is not None:
        _write(folder, _GUIDANCE, scale)


def read_learnt_guidance(folder: Path) -> float | None:
    """Return the guidance that a pipeline's transformer has learnt."""
    found = _read(folder, _GUIDANCE)
    if found is not None and not isinstance(found, int | float):
        raise CheckpointError(f"{folder / _FILES[_GUIDANCE]} says {found!r}.", fix="Write a number.")
    return found


def _write(folder: Path, key: str, value: float) -> None:
    (folder / _FILES[key]).write_text(json.dumps({key: value}) + "\n", encoding="utf-8")


def _read(folder: Path, key: str) -> Any:
    """Return what a file says; None where there is none."""
    path = folder / _FILES[key]
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read.", why=str(error), fix="Copy it again from where it was made.") from error
