"""Where in the code device memory was allocated that is still in use, and which of these places grew.

PyTorch's allocator can remember the Python stack of every allocation. Two looks at it, a while apart, tell which lines hold
more than before; the snapshot itself is written too, for https://docs.pytorch.org/memory_viz.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wandistiller.files import complete_or_absent
from wandistiller.units import Bytes

_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True)
class Growth:
    """A line of code that holds more memory than it did."""

    site: str
    num_bytes: Bytes

    def __str__(self) -> str:
        return f"{self.site} holds {self.num_bytes} more"


class AllocationRecorder:
    """Records allocations on the CUDA devices from now on; it costs a few per cent of time, so it is asked for."""

    def __init__(self) -> None:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)
        self._before: Counter[str] | None = None

    def take_baseline(self) -> None:
        """Remember what every place holds now."""
        self._before = live_bytes_by_site(torch.cuda.memory._snapshot())

    def write(self, path: Path) -> list[Growth]:
        """Write PyTorch's snapshot and return the places that grew since the baseline, the worst first."""
        with complete_or_absent(path) as unfinished:
            torch.cuda.memory._dump_snapshot(str(unfinished))
        return grown(self._before or Counter(), live_bytes_by_site(torch.cuda.memory._snapshot()))

    def close(self) -> None:
        """Stop recording."""
        torch.cuda.memory._record_memory_history(enabled=None)


def live_bytes_by_site(snapshot: Mapping[str, Any]) -> Counter[str]:
    """Add up the blocks in use of a PyTorch memory snapshot by the line that allocated them."""
    found: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[_site(block.get("frames", ()))] += block.get("requested_size", block["size"])
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int], limit: int = 5) -> list[Growth]:
    """Return the places that hold more than before, the worst first."""
    changes = {site: size - before.get(site, 0) for site, size in after.items()}
    worst = sorted((site for site, change in changes.items() if change > 0), key=lambda site: -changes[site])
    return [Growth(site, Bytes(changes[site])) for site in worst[:limit]]


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line that is not PyTorch's or Python's own."""
    frames = list(frames)
    own = [frame for frame in frames if not frame["filename"].startswith((*_LIBRARIES, "<"))] or frames
    return f"{own[0]['filename']}:{own[0]['line']} ({own[0]['name']})" if own else "somewhere before recording began"
