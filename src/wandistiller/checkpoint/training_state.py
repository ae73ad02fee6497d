"""A training's state on disk: complete or absent, the newest complete one found again, old ones retired.

A state is a folder ``step-00001000`` with the tensors in files that ranks have written together, and everything else in
``state.json``, which also says how large those files are. It is written under another name, flushed to the disk, and renamed.
A state of one process has one file, ``state.safetensors``, as states of earlier versions have; those are read as well.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from wandistiller.checkpoint.state_files import ALONE, StateReader, StateWriter
from wandistiller.distributed.pieces import local, room_like
from wandistiller.errors import CheckpointError, OutputError, UsageError, WanDistillerError, shortened
from wandistiller.files import publish_folder
from wandistiller.memory.host_limits import available_host_memory
from wandistiller.memory.shared_host import ranks_here

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_FACTS = "state.json"
_HOST_SHARE = 0.5

# DCP's, also from the thread that it writes in, where one process without a group is what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


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

    @property
    def fits_twice(self) -> bool:
        """Whether host memory has room for copies of the tensors, on behalf of all ranks of this machine."""
        needed = sum(local(tensor).nbytes for tensor in self.tensors.values())
        return needed * ranks_here() <= available_host_memory() * _HOST_SHARE


@dataclass(frozen=True)
class Saving:
    """A state that is being written."""

    path: Path
    _future: Future[Any] | None = None

    def wait(self) -> Path:
        """Return where it is once it is complete; raise what has gone wrong on any rank."""
        if self._future is not None:
            with _own_errors(self.path):
                self._future.result()
        return self.path


class TrainingStates:
    """The states of one run, in a folder of their own."""

    def __init__(self, folder: Path, keep: int) -> None:
        """``keep`` is how many complete states stay; the rest is removed once a newer one is complete."""
        self.folder = folder
        self._keep = keep

    def save(self, state: TrainingState, group: dist.ProcessGroup | None = None) -> Path:
        """Write a state; nothing is lost if this is killed at any moment.

        All ranks of ``group`` call it together, each with the tensors or pieces that it has; None is for one process.
        """
        with _own_errors(self._path(state)):
            dcp.save(dict(state.tensors), storage_writer=self._writer(state), process_group=group, no_dist=group is None)
        return self._path(state)

    def start_saving(self, state: TrainingState, group: dist.ProcessGroup | None = None) -> Saving:
        """Copy the tensors to host memory and write them beside what follows; ``group`` is used by nobody else meanwhile."""
        with _own_errors(self._path(state)):
            found = dcp.async_save(
                dict(state.tensors), storage_writer=self._writer(state), process_group=group, no_dist=group is None
            )
        # Where the copying is asynchronous too, which it is not here, the answer has two futures.
        return Saving(self._path(state), getattr(found, "upload_completion", found))

    def newest(self) -> Path | None:
        """Return the newest complete state, saying which newer ones are not."""
        for path in self._all():
            if is_complete(path):
                return path
            logger.warning("%s is not complete and is passed over.", path)
        return None

    def _path(self, state: TrainingState) -> Path:
        return self.folder / f"step-{state.step:08d}"

    def _writer(self, state: TrainingState) -> StateWriter:
        target = self._path(state)
        partial = _partial(target)

        def begin() -> None:
            self._retire()  # what a kill has left; else kills between the two could let states pile up
            partial.mkdir(parents=True)

        def complete(files: Mapping[str, int]) -> None:
            missing = [name for name in files if not (partial / name).is_file()]
            if missing:
                raise OutputError(
                    f"{target}: {shortened(missing)} of other ranks cannot be seen here.",
                    why="each rank writes its part, and the machines do not share the folder.",
                    fix="Put --output-dir on a file system that all machines share.",
                )
            text = json.dumps({"step": state.step, "files": dict(files), "facts": state.facts})
            (partial / _FACTS).write_text(text, encoding="utf-8")
            publish_folder(partial, target)
            self._retire()

        return StateWriter(partial, begin, complete)

    def _all(self) -> list[Path]:
        """Return the folders of states, the newest first."""
        found = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)] if self.folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def _retire(self) -> None:
        complete = [path for path in self._all() if is_complete(path)]
        # One state at a time is written here, so whatever is half-written or half-removed now is of one that was killed.
        for path in (*set(self._all()).difference(complete[: self._keep]), *self.folder.glob(".step-*")):
            # Without its facts a folder counts for nothing, so a kill in the middle of the removal does no harm.
            (path / _FACTS).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _own_errors(path: Path) -> Iterator[None]:
    """Raise what has gone wrong on a rank as an error of ours, DCP's lists tracebacks; remove what was half-written."""
    try:
        yield
    except CheckpointException as error:
        shutil.rmtree(_partial(path), ignore_errors=True)  # all ranks have ended their part of it when one hears of an error
        rank, (first, _) = next(iter(error.failures.items()))
        if isinstance(first, WanDistillerError):
            raise first from first.__cause__ or error
        raise OutputError(f"{path} could not be written or read.", why=f"on rank {rank}: {first}") from first


def _partial(path: Path) -> Path:
    """Return where a state is before it is complete, the same on all ranks."""
    return path.with_name(f".{path.name}.partial")


def is_complete(path: Path) -> bool:
    """Say whether a folder holds a whole state."""
    try:
        facts = json.loads((path / _FACTS).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, size in _files(facts).items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _files(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the files of tensors with their sizes."""
    return dict(content["files"]) if "files" in content else {ALONE: content["tensor_bytes"]}


def written_at(path: Path) -> float:
    """Return when a state was completed, in seconds since the epoch."""
    return (path / _FACTS).stat().st_mtime


def check_state(path: Path) -> None:
    """Raise ``UsageError`` or ``CheckpointError`` for what is no state, or not a whole one."""
    if not path.is_dir():
        raise UsageError(f"--resume {path} does not exist.", fix="Give the folder of a state, or 'auto'.")
    if not is_complete(path):
        raise CheckpointError(
            f"{path} is not a complete training state.",
            why="its writing was interrupted, or it is something else.",
            fix="Give another one, or --resume auto for the newest that is complete.",
        )


def load_state(path: Path, like: Callable[[str], Tensor | None] = lambda name: None) -> TrainingState:
    """Read a state into host memory; where ``like`` gives a tensor that is cut, this rank's piece on its device."""
    check_state(path)
    content = json.loads((path / _FACTS).read_text(encoding="utf-8"))
    reader = StateReader([path / name for name in _files(content)])
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in reader.tensors.items():
        model = like(name)
        is_cut = isinstance(model, DTensor) and model.shape == shape
        tensors[name] = room_like(model, dtype) if is_cut else torch.empty(shape, dtype=dtype)
    with _own_errors(path):
        dcp.load(tensors, storage_reader=reader, no_dist=True)  # each rank reads for itself, whoever else there is
    return TrainingState(content["step"], tensors, content["facts"])


def load_facts(path: Path) -> TrainingState:
    """Read a state without its tensors."""
    check_state(path)
    content = json.loads((path / _FACTS).read_text(encoding="utf-8"))
    return TrainingState(content["step"], {}, content["facts"])
