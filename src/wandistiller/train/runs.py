"""How every training begins and ends: from a state or the start, and with a word on how to go on."""

from __future__ import annotations

from pathlib import Path

from wandistiller.checkpoint.training_state import TrainingStates, load_state
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import UsageError
from wandistiller.terminal import say
from wandistiller.train.loop import Loop, Stopped


def resume_run(resume: str | None, loop: Loop, states: TrainingStates, output_dir: Path) -> None:
    """Load the state that ``resume`` names: None for a new run, ``auto`` for the newest, or a folder."""
    newest = states.newest()
    if resume is None:
        if newest is not None:
            raise UsageError(
                f"{output_dir} holds a training already, up to {newest.name}.",
                fix="Go on with it with --resume auto, or give another --output-dir.",
            )
        return
    path = newest if resume == "auto" else Path(resume)
    if path is None:
        say(f"There is no state in {states.folder} yet; starting from the beginning")
        return
    if newest is not None and path.resolve() != newest.resolve() and path.resolve().parent == newest.resolve().parent:
        raise UsageError(
            f"{newest} is newer than {path}.",
            why="going on from the older one would leave two histories in one folder.",
            fix=f"Copy {path.name} and give another --output-dir, or move the newer ones away.",
        )
    loop.load(load_state(path))
    if loop.ranks.is_first:
        say(f"Going on from {path}, step {loop.step}")


def exit_code(stopped: Stopped, ranks: Ranks) -> int:
    """Return what the command ends with, as shells know it for a signal."""
    if stopped.signal is None:
        return 0
    if ranks.is_first:
        say(f"Stopped at step {stopped.step}; {stopped.state} is saved. Go on with --resume auto")
    return 128 + stopped.signal
