"""A training's state on disk: complete or absent, the newest complete one found again, old ones retired.

A state is a folder ``step-00001000`` with the tensors in ``state.safetensors`` and everything else in ``state.json``, which
also says how large the tensors' file is. It is written under another name, flushed to the disk, and renamed.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.files import complete_or_absent
from wandistiller.models.weight_files import Planned, SafetensorsWeights, write_safetensors

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_TENSORS, _FACTS = "state.safetensors", "state.json"


@dataclass(frozen=True)
class TrainingState:
    """What a run needs to go on: tensors by name, and plain values."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors below a name, without it."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}


class TrainingStates:
    """The states of one run, in a folder of their own."""

    def __init__(self, folder: Path, keep: int) -> None:
        """``keep`` is how many complete states stay; the rest is removed once a newer one is complete."""
        self.folder = folder
        self._keep = keep

    def save(self, state: TrainingState) -> Path:
        """Write a state; nothing is lost if this is killed at any moment."""
        target = self.folder / f"step-{state.step:08d}"
        self._retire()  # what a kill has left; else kills between the two could let states pile up
        with complete_or_absent(target) as partial:
            partial.mkdir(parents=True)
            planned = [_planned(name, tensor) for name, tensor in state.tensors.items()]
            write_safetensors(partial / _TENSORS, planned, {})
            size = (partial / _TENSORS).stat().st_size
            text = json.dumps({"step": state.step, "tensor_bytes": size, "facts": state.facts})
            (partial / _FACTS).write_text(text, encoding="utf-8")
        self._retire()
        return target

    def newest(self) -> Path | None:
        """Return the newest complete state, saying which newer ones are not."""
        for path in self._all():
            if is_complete(path):
                return path
            logger.warning("%s is not complete and is passed over.", path)
        return None

    def _all(self) -> list[Path]:
        """Return the folders of states, the newest first."""
        found = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)] if self.folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def _retire(self) -> None:
        complete = [path for path in self._all() if is_complete(path)]
        # One process writes here, so whatever is half-written or half-removed now is of one that was killed.
        for path in (*set(self._all()).difference(complete[: self._keep]), *self.folder.glob(".step-*")):
            # Without its facts a folder counts for nothing, so a kill in the middle of the removal does no harm.
            (path / _FACTS).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _planned(name: str, tensor: Tensor) -> Planned:
    return Planned(name, tensor.dtype, tuple(tensor.shape), lambda: tensor.detach().cpu())


def is_complete(path: Path) -> bool:
    """Say whether a folder holds a whole state."""
    try:
        facts = json.loads((path / _FACTS).read_text(encoding="utf-8"))
        return bool((path / _TENSORS).stat().st_size == facts["tensor_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def load_state(path: Path) -> TrainingState:
    """Read a state into host memory."""
    if not path.is_dir():
        raise UsageError(f"--resume {path} does not exist.", fix="Give the folder of a state, or 'auto'.")
    if not is_complete(path):
        raise CheckpointError(
            f"{path} is not a complete training state.",
            why="its writing was interrupted, or it is something else.",
            fix="Give another one, or --resume auto for the newest that is complete.",
        )
    content = json.loads((path / _FACTS).read_text(encoding="utf-8"))
    weights = SafetensorsWeights(path / _TENSORS, [path / _TENSORS])
    tensors = {name: weights.read(name) for name in weights.entries}
    return TrainingState(content["step"], tensors, content["facts"])
