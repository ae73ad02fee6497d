"""Where pictures, clips and captions come from: a folder, a list, or the procedural world.

``open_source`` looks at every item before anything is computed, without decoding whole clips, and names all that cannot be
used. Pixels are read when they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image

from wandistiller.data.buckets import Bucket, MediaSize, choose_bucket
from wandistiller.data.media_files import BadItem, FileSource, MediaFile, caption_file, look_at, read_list, scan_folder
from wandistiller.data.pictures import MEDIA_SUFFIXES, fit
from wandistiller.errors import UsageError
from wandistiller.files import expand_home

if TYPE_CHECKING:
    from wandistiller.data.world import World

_WORLD_SHAPE = r"(?P<frames>\d+(?:\+\d+)*)x(?P<height>\d+)x(?P<width>\d+)"
_WORLD = re.compile(rf"world(?P<held>-heldout)?(?::(?P<count>\d+)(?::{_WORLD_SHAPE})?)?")
_WORLD_DEFAULTS = {"count": "1000", "frames": "1", "height": "32", "width": "32"}
_NUM_SHOWN = 5


class Source(Protocol):
    """Captioned media by number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return what an item is called, here and in caches: a relative path without suffix."""
        ...

    def caption(self, index: int) -> str: ...

    def media_size(self, index: int) -> MediaSize: ...

    def read(self, index: int, bucket: Bucket) -> np.ndarray:
        """Return bytes (frames, height, width, 3) in the shape of the bucket; raise ``MediaError`` for damaged media."""
        ...

    def stamp(self, index: int) -> str:
        """Return what is cheap to know and changes with the media; ``fingerprint`` tells whether it really has changed."""
        ...

    def fingerprint(self, index: int) -> str:
        """Return a hash of the media's content."""
        ...


@dataclass(frozen=True)
class OpenedSource:
    """A source in which everything can be used, and what was left out of it."""

    source: Source
    bad: list[BadItem]


@dataclass(frozen=True)
class Assignment:
    """The bucket of each item; None for those that fit none, which are listed."""

    buckets: list[Bucket | None]
    bad: list[BadItem]


def open_source(
    path: str | Path, *, skip_bad: bool = False, seed: int = 0, flag: str = "--dataset-path", captioned: bool = True
) -> OpenedSource:
    """Open a folder, a list file (file TAB caption), a JSONL file, or ``world:COUNT:FRAMESxHEIGHTxWIDTH``.

    ``world:1000:1+9x64x64`` has pictures and clips in turn.
    What cannot be used is an error that names it; with ``skip_bad`` it is left out and returned. ``seed`` is the world's,
    ``flag`` what the user gave the path with. Without ``captioned`` captions are neither needed nor looked at.
    """
    world = _WORLD.fullmatch(str(path))
    if world:
        return OpenedSource(_open_world(world, seed), [])
    place = expand_home(path)
    if place.is_dir():
        files = list(scan_folder(place))
        found: Sequence[MediaFile | BadItem] = files
        if not files:
            raise UsageError(
                f"{path} has no pictures or clips.",
                why=f"none of its files ends in {', '.join(MEDIA_SUFFIXES)}.",
                fix="Point to the folder that has them; a caption is a text file beside each, NAME.txt for NAME.png.",
            )
        if captioned and not any(caption_file(item.path).exists() for item in files):
            raise UsageError(
                f"None of the {len(files)} pictures and clips in {path} has a caption.",
                why=f"there is no {caption_file(files[0].path).name} beside {files[0].path.name}, and so on.",
                fix="Write a text file beside each, NAME.txt for NAME.png, or give a list file instead.",
            )
    elif place.is_file():
        found = list(read_list(place, captioned))
        if not found:
            raise UsageError(f"{path} lists nothing.", fix="Write one item a line: the file, a tab, the caption.")
    else:
        hint = " The world is written world:COUNT:FRAMESxHEIGHTxWIDTH." if str(path).startswith("world") else ""
        raise UsageError(f"{path} does not exist.", fix=f"Check {flag} for a typing error.{hint}")
    return _check_all(str(path), found, skip_bad, captioned)


def is_world(path: str | Path) -> bool:
    """Say whether this names the procedural world rather than files."""
    return _WORLD.fullmatch(str(path)) is not None


def assign_buckets(source: Source, buckets: Sequence[Bucket]) -> Assignment:
    """Choose a bucket for every item."""
    chosen = [choose_bucket(source.media_size(index), buckets) for index in range(len(source))]
    shortest = min(bucket.frames for bucket in buckets)
    bad = [
        BadItem(source.name(index), f"has {source.media_size(index).frames} frames; the smallest of --frames is {shortest}")
        for index, bucket in enumerate(chosen)
        if bucket is None
    ]
    return Assignment(chosen, bad)


def refuse(place: str, total: int, bad: Sequence[BadItem]) -> UsageError:
    """Return the error that names what cannot be used."""
    return UsageError(
        f"{len(bad)} of {total} items of {place} cannot be used.",
        why=_name_some(bad),
        fix="Mend or remove them, or add --skip-bad to go on without them.",
    )


def nothing_left(place: str, bad: Sequence[BadItem]) -> UsageError:
    """Return the error for data of which nothing can be used."""
    return UsageError(f"Nothing in {place} can be used.", why=_name_some(bad), fix="Mend these files, or point elsewhere.")


def _name_some(bad: Sequence[BadItem]) -> str:
    shown = "; ".join(map(str, bad[:_NUM_SHOWN]))
    more = f"; and {len(bad) - _NUM_SHOWN} more" if len(bad) > _NUM_SHOWN else ""
    return f"{shown}{more}."


class WorldSource:
    """The procedural world as a source; nothing is on disk."""

    def __init__(
        self,
        count: int,
        *,
        frames: Sequence[int] = (1,),
        height: int = 32,
        width: int = 32,
        seed: int = 0,
        held_out: bool = False,
    ) -> None:
        """Items have each number of ``frames`` in turn."""
        from wandistiller.data.world import World

        shape = {"height": height, "width": width}
        self._worlds = [World(count, frames=each, seed=seed, held_out=held_out, **shape) for each in frames]

    def __len__(self) -> int:
        return len(self._worlds[0])

    def name(self, index: int) -> str:
        return self._world(index).name(index)

    def caption(self, index: int) -> str:
        return self._world(index).caption(index)

    def media_size(self, index: int) -> MediaSize:
        world = self._world(index)
        return MediaSize(world.width, world.height, world.frames, fps=0.0 if world.frames == 1 else 8.0)

    def read(self, index: int, bucket: Bucket) -> np.ndarray:
        frames = self._world(index).frames_of(index)[: bucket.frames]
        return np.stack([fit(Image.fromarray(frame), bucket.height, bucket.width) for frame in frames])

    def stamp(self, index: int) -> str:
        return self.fingerprint(index)

    def fingerprint(self, index: int) -> str:
        # What is drawn follows from these; drawing it just to hash it would take longer than most of encoding.
        from wandistiller.data.world import drawing_version

        size = self.media_size(index)
        return f"{drawing_version()} {self.caption(index)} {size.frames}x{size.height}x{size.width}"

    def _world(self, index: int) -> World:
        return self._worlds[index % len(self._worlds)]


def _open_world(match: re.Match[str], seed: int) -> WorldSource:
    given = {name: match[name] or usual for name, usual in _WORLD_DEFAULTS.items()}
    frames = [int(each) for each in given.pop("frames").split("+")]
    numbers = {name: int(value) for name, value in given.items()}
    if min(*numbers.values(), *frames) < 1:
        raise UsageError(f"{match[0]} is an empty world.", fix="Give numbers of 1 and more, such as world:1000:1x32x32.")
    return WorldSource(**numbers, frames=frames, seed=seed, held_out=bool(match["held"]))


def _check_all(place: str, found: Sequence[MediaFile | BadItem], skip_bad: bool, captioned: bool) -> OpenedSource:
    """Look at every item; the first of several that have one name counts."""
    seen: dict[str, Path] = {}
    good: list[MediaFile] = []
    bad: list[BadItem] = []
    for item in look_at(found, captioned):
        if isinstance(item, MediaFile) and item.name in seen:
            item = BadItem(str(item.path), f"has the same name as {seen[item.name]}, so they would share a cache")
        if isinstance(item, BadItem):
            bad.append(item)
        else:
            seen[item.name] = item.path
            good.append(item)
    if bad and (not skip_bad or not good):
        raise refuse(place, len(found), bad) if good else nothing_left(place, bad)
    return OpenedSource(FileSource(good), bad)
