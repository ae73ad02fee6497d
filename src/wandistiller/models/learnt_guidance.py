"""What guidance a student has learnt, so that it is not guided a second time: kept beside its weights, like its text limit."""

from __future__ import annotations

import json
from pathlib import Path

from wandistiller.errors import CheckpointError

LEARNT_GUIDANCE_NAME = "learnt_guidance.json"


def write_learnt_guidance(folder: Path, scale: float | None) -> None:
    """Write the teacher's guidance into a student's folder; None for one that is guided like any other model."""
    if scale is not None:
        (folder / LEARNT_GUIDANCE_NAME).write_text(json.dumps({"guidance_scale": scale}) + "\n", encoding="utf-8")


def read_learnt_guidance(folder: Path) -> float | None:
    """Return the guidance that a pipeline's transformer has learnt."""
    path = folder / LEARNT_GUIDANCE_NAME
    if not path.is_file():
        return None
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["guidance_scale"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read.", why=str(error), fix="Copy it again from where it was made.") from error
