"""Media that begin well and cannot be decoded, found before anything is computed with them.

A header says nothing of what follows it, so every file is decoded once. Which ones were good is remembered by their size and
time of change, so that the next run need not do it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from wandistiller.data.media_files import BadItem, FileSource
from wandistiller.data.source_samples import SourceSamples
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import MediaError
from wandistiller.terminal import progress


def find_damaged(samples: SourceSamples, cache_dir: Path, ranks: Ranks) -> dict[int, BadItem]:
    """Decode what is not known to be good, ranks in turn; return what cannot be, by its number among the samples.

    ``cache_dir`` is where good ones are remembered, if it can be written to.
    """
    if not isinstance(samples.source, FileSource):
        return {}
    memory = _GoodMedia(cache_dir / "decoded.jsonl")
    mine = range(ranks.rank, len(samples), ranks.world_size)
    unknown = [number for number in mine if not memory.knows(samples, number)]
    found = _decode(samples, unknown, memory, is_shown=ranks.is_first) if unknown else {}
    return {number: item for each in ranks.gather(found) for number, item in sorted(each.items())}


def _decode(samples: SourceSamples, numbers: Sequence[int], memory: _GoodMedia, *, is_shown: bool) -> dict[int, BadItem]:
    def look_at(number: int) -> BadItem | str:
        try:
            stamp = samples.source.stamp(samples.items[number])
            samples.source.read(samples.items[number], samples.buckets[number])
        except MediaError as error:
            reason = error.what.rstrip(".")
            return BadItem(samples.name(number), f"{reason} ({error.why.rstrip('.')})" if error.why else reason)
        return stamp

    bad: dict[int, BadItem] = {}
    bar = progress("Decoding media", len(numbers), "file") if is_shown else nullcontext(lambda: None)
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        with bar as advance, memory:
            for number, found in zip(numbers, pool.map(look_at, numbers), strict=True):
                if isinstance(found, BadItem):
                    bad[number] = found
                else:
                    memory.add(samples, number, found)
                advance()
    finally:
        pool.shutdown(cancel_futures=True)
    return bad


class _GoodMedia:
    """A file with one line for each that was decoded: its name, its size and time of change, and how many frames."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[str, int]] = {}
        self._file: TextIO | None = None
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return
        for line in lines:
            try:
                name, stamp, frames = json.loads(line)
                self._known[name] = (stamp, int(frames))
            except (ValueError, TypeError):  # cut short by whoever was killed
                continue

    def knows(self, samples: SourceSamples, number: int) -> bool:
        """Say whether as many frames as are wanted were decoded of the file as it is now."""
        stamp, frames = self._known.get(samples.name(number), ("", 0))
        return frames >= samples.buckets[number].frames and stamp == samples.source.stamp(samples.items[number])

    def __enter__(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError:  # data that nobody may write beside are decoded every time
            self._file = None

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, samples: SourceSamples, number: int, stamp: str) -> None:
        if self._file is not None:
            self._file.write(json.dumps([samples.name(number), stamp, samples.buckets[number].frames]) + "\n")
