"""How much of a caption a student was taught with: kept beside its weights, as diffusers' own files have no place for it."""

from __future__ import annotations

import json
from pathlib import Path

from wandistiller.errors import CheckpointError
from wandistiller.models.text_padding import TEXT_TOKENS

TEXT_LIMIT_NAME = "text_max_length.json"


def write_text_limit(folder: Path, max_tokens: int) -> None:
    """Write the limit into a pipeline's folder; one that takes whole captions has none."""
    if max_tokens < TEXT_TOKENS:
        (folder / TEXT_LIMIT_NAME).write_text(json.dumps({"text_max_length": max_tokens}) + "\n", encoding="utf-8")


def read_text_limit(folder: Path) -> int:
    """Return after how many tokens a pipeline's captions are cut off."""
    path = folder / TEXT_LIMIT_NAME
    if not path.is_file():
        return TEXT_TOKENS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["text_max_length"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read.", why=str(error), fix="Copy it again from where it was made.") from error
    if not isinstance(found, int) or not 1 <= found <= TEXT_TOKENS:
        raise CheckpointError(f"{path} says {found!r}.", fix=f"Write a whole number from 1 to {TEXT_TOKENS}.")
    return found
