"""Pictures and clips in files, with their captions: found in a folder or a list, and looked at without decoding whole clips."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from wandistiller.data.buckets import Bucket, MediaSize
from wandistiller.data.pictures import MEDIA_SUFFIXES, probe, read_media
from wandistiller.errors import MediaError, UsageError
from wandistiller.files import expand_home
from wandistiller.terminal import progress, say

RESERVED_NAME = ".empty"
"""The name under which caches keep what belongs to the empty caption; no item may have it."""
HELD_OUT_FOLDER = ".held_out"
"""The folder in a cache that is for held-out data; no item of the training data may lie in one of this name."""

_NOT_READ = frozenset(".gif .bmp .tif .tiff .avif .heic .jxl .m4v .mpg .mpeg .wmv .flv .ts .ogv .3gp".split())
"""Pictures and clips of other kinds, which somebody may have meant to train on."""
_FILE_FIELDS = ("file", "media", "video", "image")
_CAPTION_FIELDS = ("caption", "text")


@dataclass(frozen=True)
class BadItem:
    """Something that cannot be used, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class MediaFile:
    """One file; its caption, or None if that lies beside it; its size once it has been looked at."""

    name: str
    path: Path
    caption: str | None = None
    size: MediaSize | None = None


class FileSource:
    """Media in files that have been looked at."""

    def __init__(self, items: Sequence[MediaFile]) -> None:
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


def scan_folder(folder: Path) -> Iterator[MediaFile]:
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
    others = Counter(path.suffix.lower() for path in paths if path.suffix.lower() in _NOT_READ)
    if others:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
        say(f"Passed over in {folder}: {kinds}; what is read ends in {', '.join(MEDIA_SUFFIXES)}")
    for path in sorted(paths):
        if path.suffix.lower() in MEDIA_SUFFIXES:
            yield MediaFile(_name(path, folder), path)


def read_list(file: Path, captioned: bool) -> Iterator[MediaFile | BadItem]:
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


def _parse_line(file: Path, label: str, line: bytes, parse: Callable[[str], tuple[str, str]]) -> MediaFile | BadItem:
    try:
        media, caption = parse(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadItem(label, "is not UTF-8")
    except ValueError as error:
        return BadItem(label, str(error))
    path = file.parent / expand_home(media)
    if path.suffix.lower() not in MEDIA_SUFFIXES:
        return BadItem(label, f"{media} does not end in one of {', '.join(MEDIA_SUFFIXES)}")
    return MediaFile(_name(path, file.parent), path, caption.strip())


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


def caption_file(path: Path) -> Path:
    return path.with_suffix(".txt")


def _read_caption(item: MediaFile) -> str:
    """Return an item's caption; raise ``MediaError`` where there is none."""
    if item.caption is not None:
        return item.caption
    file = caption_file(item.path)
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


def look_at(found: Sequence[MediaFile | BadItem], captioned: bool) -> list[MediaFile | BadItem]:
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


def _look_at_one(item: MediaFile | BadItem, captioned: bool) -> MediaFile | BadItem:
    if isinstance(item, BadItem):
        return item
    if not _is_text(item.name):
        return BadItem(str(item.path).encode(errors="backslashreplace").decode(), "has a name that is not UTF-8")
    if item.name == RESERVED_NAME or item.name.endswith(".latent") or item.name.startswith(f"{HELD_OUT_FOLDER}/"):
        return BadItem(str(item.path), "has a name that caches use for themselves")
    try:
        if captioned and not _read_caption(item):
            return BadItem(str(item.path), "has an empty caption")
        return MediaFile(item.name, item.path, item.caption, probe(item.path))
    except MediaError as error:
        reason = error.what.removeprefix(f"{item.path} ").rstrip(".")
        return BadItem(str(item.path), f"{reason} ({error.why.rstrip('.')})" if error.why else reason)
