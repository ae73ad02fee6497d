"""The pipeline in the box: a tiny Wan that has learnt the procedural world, shipped with the package.

``wandistiller/box`` holds it together with what tells how it came about: the commands with their seeds, and the metrics of
every training. ``make tiny`` makes it again; see ``scripts/make_tiny.py``.
"""

from __future__ import annotations

from pathlib import Path

from wandistiller.errors import UsageError

BOX = Path(__file__).parents[1] / "box"


def box_pipeline_folder() -> Path:
    """Return the folder of the pipeline; raise ``UsageError`` where the package came without it."""
    folder = BOX / "pipeline"
    if not (folder / "model_index.json").is_file():
        raise UsageError(
            "The trained tiny Wan is not in this installation.",
            why=f"there is no {folder}.",
            fix="Train it on a GPU with 'make tiny', or use 'tiny-random', a tiny Wan with random weights.",
        )
    return folder
