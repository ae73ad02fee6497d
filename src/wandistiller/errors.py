"""The one family of errors that this program raises on purpose.

A message says what happened, why, and what to do about it. ``exit_code`` is what the command line ends with: 2 for
anything that the user can mend by changing the input, 1 for the rest. Errors that are not of this family are bugs and
keep their traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WanDistillerError(Exception):
    """Something that the user should read, in three parts."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__("\n".join(part for part in (what, why and f"  why: {why}", fix and f"  do:  {fix}") if part))


class UsageError(WanDistillerError):
    """The flags or the configuration file ask for something that cannot be."""

    exit_code = 2


class CheckpointError(WanDistillerError):
    """A file of weights is damaged, incomplete, unsafe, or of another model."""

    exit_code = 2


class MediaError(WanDistillerError):
    """A picture or clip cannot be read."""

    exit_code = 2


class OutputError(WanDistillerError):
    """A result could not be written, or what was written does not prove equal to its source."""


class TrainingError(WanDistillerError):
    """A training cannot go on."""


class RankError(WanDistillerError):
    """A rank of the job is gone, or ranks wait for each other in vain."""


class OutOfRoomError(WanDistillerError):
    """Memory of a device, of the host, or of a disk is used up."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return ``", did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else ""


def shortened(names: Iterable[str], limit: int = 6) -> str:
    """Join names for a message, the rest counted: ``a, b, c and 12 more``."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
