"""Where pictures, clips and captions come from: a folder, a list, or the procedural world.

``open_source`` looks at every item before anything is computed, without decoding whole clips, and names all that cannot be
used. Pixels are read when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from wandistiller.data.buckets import Bucket, MediaSize, choose_bucket
from wandistiller.data.pictures import MEDIA_SUFFIXES, fit, probe, read_media
from wandistiller.errors import MediaError, UsageError
from wandistiller.files import expand_home
from wandistiller.terminal import progress

if TYPE_CHECKING:
    from wandistiller.data.world import World

RESERVED_NAME = ".empty"
"""The name under which caches keep what belongs to the empty caption; no item may have it."""
HELD_OUT_FOLDER = ".held_out"
"""The folder in a cache that is for held-out data; no item of the training data may lie in one of this name."""

_FILE_FIELDS = ("file", "media", "video", "image")
_CAPTION_FIELDS = ("caption", "text")
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
class BadItem:
    """Something that cannot be used, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


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
        files = list(_scan_folder(place))
        found: Sequence[_Item | BadItem] = files
        if not files:
            raise UsageError(
                f"{path} has no pictures or clips.",
                why=f"none of its files ends in {', '.join(MEDIA_SUFFIXES)}.",
                fix="Point to the folder that has them; a caption is a text file beside each, NAME.txt for NAME.png.",
            )
        if captioned and not any(_caption_file(item.path).exists() for item in files):
            raise UsageError(
                f"None of the {len(files)} pictures and clips in {path} has a caption.",
                why=f"there is no {_caption_file(files[0].path).name} beside {files[0].path.name}, and so on.",
                fix="Write a text file beside each, NAME.txt for NAME.png, or give a list file instead.",
            )
    elif place.is_file():
        found = list(_read_list(place, captioned))
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


@dataclass(frozen=True)
class _Item:
    """One file; its caption, or None if that lies beside it; its size once it has been looked at."""

    name: str
    path: Path
    caption: str | None = None
    size: MediaSize | None = None


class FileSource:
    """Media in files that have been looked at."""

    def __init__(self, items: Sequence[_Item]) -> None:
        self._items = list(items)

    def __len__(self) -> int:
        return len(self._items)

    def name(self, index: int) -> str:
        return self._items[index].name

    def path(self, index: int) -> Path:
        """Return where the media lie."""
        return self._items[index].path

    def caption(self, index: int) -> str:
        return _read_caption(self._items[index])

    def media_size(self, index: int) -> MediaSize:
        size = self._items[index].size
        assert size is not None  # open_source() has looked
        return size

    def read(self, index: int, bucket: Bucket) -> np.ndarray:
        return read_media(self.path(index), bucket)

    def stamp(self, index: int) -> str:
        status = self._status(index)
        return f"{status.st_size}:{status.st_mtime_ns}"

    def fingerprint(self, index: int) -> str:
        self._status(index)
        with self.path(index).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _status(self, index: int) -> os.stat_result:
        try:
            return self.path(index).stat()
        except OSError as error:
            raise MediaError(f"{self.path(index)} is gone.", why=str(error), fix="Put it back, or start again.") from error


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


def _scan_folder(folder: Path) -> Iterator[_Item]:
    """Find media in a folder and below, in order; what is hidden (caches, leavings of other systems) does not count."""

    def fail(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read.", why=str(error), fix="Check its permissions.") from error

    visited: set[str] = set()
    paths: list[Path] = []
    for top, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(top)
        folders[:] = [] if real in visited else sorted(name for name in folders if not name.startswith("."))
        if real not in visited:  # links may lead round in a circle
            paths += [Path(top, name) for name in files if not name.startswith(".")]
        visited.add(real)
    for path in sorted(paths):
        if path.suffix.lower() in MEDIA_SUFFIXES:
            yield _Item(_name(path, folder), path)


def _read_list(file: Path, captioned: bool) -> Iterator[_Item | BadItem]:
    """Read a list file or a JSONL file line by line."""
    suffix = file.suffix.lower()
    if suffix in (*MEDIA_SUFFIXES, ".json"):
        what = "one JSON object, not one a line" if suffix == ".json" else "a single picture or clip"
        raise UsageError(f"{file} is {what}.", fix="Give a folder, a list (file TAB caption) or a .jsonl file.")
    parse = partial(_parse_json if suffix == ".jsonl" else _parse_tab, captioned=captioned)
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise UsageError(f"{file} cannot be read.", why=str(error), fix="Check its permissions.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse_line(file, f"{file.name}, line {number}", line, parse)


def _parse_line(file: Path, label: str, line: bytes, parse: Callable[[str], tuple[str, str]]) -> _Item | BadItem:
    try:
        media, caption = parse(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadItem(label, "is not UTF-8")
    except ValueError as error:
        return BadItem(label, str(error))
    path = file.parent / expand_home(media)
    if path.suffix.lower() not in MEDIA_SUFFIXES:
        return BadItem(label, f"{media} does not end in one of {', '.join(MEDIA_SUFFIXES)}")
    return _Item(_name(path, file.parent), path, caption.strip())


def _parse_tab(line: str, captioned: bool) -> tuple[str, str]:
    media, tab, caption = line.partition("\t")
    if (captioned and not tab) or not media.strip():
        raise ValueError("has no tab between file and caption")
    return media.strip(), caption


def _parse_json(line: str, captioned: bool) -> tuple[str, str]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error
    return _field(values, _FILE_FIELDS), _field(values, _CAPTION_FIELDS) if captioned else ""


def _field(values: Any, names: Sequence[str]) -> str:
    found = next((values[name] for name in names if name in values), None) if isinstance(values, dict) else None
    if not isinstance(found, str):
        raise ValueError(f"has no text under '{names[0]}' (or {', '.join(names[1:])})")
    if not _is_text(found):
        raise ValueError(f"has half a character (a lone surrogate) under '{names[0]}'")
    return found


def _is_text(value: str) -> bool:
    """Say whether UTF-8 can hold this: file names of other encodings and escapes in JSON may be of halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _name(path: Path, folder: Path) -> str:
    """Return the path without suffix, relative to the folder; for what lies elsewhere, all of the path."""
    absolute, top = (Path(os.path.normpath(each.absolute())) for each in (path, folder))
    inside = absolute.relative_to(top) if absolute.is_relative_to(top) else absolute.relative_to(absolute.anchor)
    return PurePath(inside).with_suffix("").as_posix()


def _caption_file(path: Path) -> Path:
    return path.with_suffix(".txt")


def _read_caption(item: _Item) -> str:
    """Return an item's caption; raise ``MediaError`` where there is none."""
    if item.caption is not None:
        return item.caption
    file = _caption_file(item.path)
    try:
        return file.read_bytes().decode("utf-8-sig").strip()
    except FileNotFoundError as error:
        raise MediaError(
            f"{item.path} has no caption.", why=f"there is no {file.name} beside it.", fix=f"Write it into {file.name}."
        ) from error
    except UnicodeDecodeError as error:
        raise MediaError(f"{item.path} has a caption that is not UTF-8.", fix=f"Save {file.name} as UTF-8.") from error
    except OSError as error:
        raise MediaError(
            f"{item.path} has a caption that cannot be read.", why=str(error), fix=f"Check the permissions of {file.name}."
        ) from error


def _check_all(place: str, found: Sequence[_Item | BadItem], skip_bad: bool, captioned: bool) -> OpenedSource:
    """Look at every item; the first of several that have one name counts."""
    seen: dict[str, Path] = {}
    good: list[_Item] = []
    bad: list[BadItem] = []
    for item in _look_at(found, captioned):
        if isinstance(item, _Item) and item.name in seen:
            item = BadItem(str(item.path), f"has the same name as {seen[item.name]}, so they would share a cache")
        if isinstance(item, BadItem):
            bad.append(item)
        else:
            seen[item.name] = item.path
            good.append(item)
    if bad and (not skip_bad or not good):
        raise refuse(place, len(found), bad) if good else nothing_left(place, bad)
    return OpenedSource(FileSource(good), bad)


def _look_at(found: Sequence[_Item | BadItem], captioned: bool) -> list[_Item | BadItem]:
    # Opening a clip takes milliseconds, most of them outside of Python.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        looked = pool.map(partial(_look_at_one, captioned=captioned), found)
        if len(found) < 1000:
            return list(looked)
        results = []
        with progress("Looking at media", len(found), "file") as advance:
            for item in looked:
                results.append(item)
                advance()
        return results


def _look_at_one(item: _Item | BadItem, captioned: bool) -> _Item | BadItem:
    if isinstance(item, BadItem):
        return item
    if not _is_text(item.name):
        return BadItem(str(item.path).encode(errors="backslashreplace").decode(), "has a name that is not UTF-8")
    if item.name == RESERVED_NAME or item.name.endswith(".latent") or item.name.startswith(f"{HELD_OUT_FOLDER}/"):
        return BadItem(str(item.path), "has a name that caches use for themselves")
    try:
        if captioned and not _read_caption(item):
            return BadItem(str(item.path), "has an empty caption")
        return _Item(item.name, item.path, item.caption, probe(item.path))
    except MediaError as error:
        reason = error.what.removeprefix(f"{item.path} ").rstrip(".")
        return BadItem(str(item.path), f"{reason} ({error.why.rstrip('.')})" if error.why else reason)
