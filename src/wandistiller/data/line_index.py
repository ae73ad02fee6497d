"""Where the lines of a large text file begin, in a few bytes for hundreds of lines.

One pass finds every line that is not blank and keeps the place of each 128th; the lines in between are found by reading one
piece of some kilobytes. Ten million lines take less than a second and little more than a megabyte. For large files the index
is kept in ``.cache`` beside the file, with the size and time of what it was made from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from wandistiller.data.cache_files import CacheFile, Requirement, cache_path
from wandistiller.errors import OutputError, UsageError
from wandistiller.terminal import say

BOM = b"\xef\xbb\xbf"
LINES_PER_PIECE = 128
LONGEST_LINE = 2**20

# What stays in the processor's cache is gone through twice as fast as what does not.
_CHUNK_BYTES = 2**18
_KEEP_FROM_BYTES = 32 * 2**20
# Decoding is slow where text is not ASCII. Of larger files, as many bytes are decoded, evenly spread; what is read later is
# decoded then.
_DECODED_BYTES = 256 * 2**20
# How white space beyond ASCII begins in UTF-8: no-break space, ideographic space and the like.
_WIDE_SPACES = (0xC285, 0xC2A0, 0xE19A, 0xE280, 0xE281, 0xE380)
_VERSION = "2"
_SAVE_AS_UTF8 = "Save it as UTF-8, one prompt a line, for example with: iconv -f ENCODING -t UTF-8"


@dataclass(frozen=True)
class Stamp:
    """What tells that a file has changed."""

    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, file: BinaryIO) -> Stamp:
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns)


class Line(NamedTuple):
    """A line without white space around it, and its number from 1 on, blank lines counted."""

    number: int
    content: bytes


@dataclass(frozen=True)
class LineIndex:
    """The lines of one file that are not blank, by number from 0 on."""

    path: Path
    stamp: Stamp
    num_lines: int
    offsets: NDArray[np.int64]
    """Where each piece of ``LINES_PER_PIECE`` lines begins."""
    numbers: NDArray[np.int64]
    """How many lines, with blank ones, are before each piece."""

    def read_piece(self, piece: int) -> list[Line]:
        """Return the lines of one piece; raise ``UsageError`` if the file is not what it was."""
        with open_text(self.path) as file:
            if Stamp.of(file) != self.stamp:
                raise UsageError(f"{self.path} has changed while it was in use.", fix="Start again.")
            start = int(self.offsets[piece])
            end = int(self.offsets[piece + 1]) if piece + 1 < len(self.offsets) else self.stamp.num_bytes
            file.seek(start)
            content = file.read(end - start)
        lines = enumerate(content.split(b"\n"), start=int(self.numbers[piece]) + 1)
        return [Line(number, line.strip()) for number, line in lines if not _is_blank(line)]


def index_lines(path: Path) -> LineIndex:
    """Find the lines of a file, or read what was found before; raise ``UsageError`` for what is not UTF-8 text."""
    with open_text(path) as file:
        stamp = Stamp.of(file)
        if stamp.num_bytes < _KEEP_FROM_BYTES:
            return _scan(path, file, stamp)
        kept = _cache_file(path)
        required = [Requirement(name, value, "is of another file") for name, value in _metadata(stamp).items()]
        if kept.problem(required) is None:
            return _read_kept(path, stamp, kept, required)
        index = _scan(path, file, stamp)
    _keep(index, kept)
    return index


def open_text(path: Path) -> BinaryIO:
    """Open a file for reading; raise ``UsageError`` where that is not possible."""
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read.", why=str(error), fix="Check the path and its permissions.") from error


def refuse_encoding(path: Path, number: int, error: UnicodeDecodeError) -> UsageError:
    """Return the error for a line that is not UTF-8."""
    byte = error.object[error.start]
    return UsageError(f"{path}, line {number} is not UTF-8.", why=f"it has the byte 0x{byte:02x}.", fix=f"{_SAVE_AS_UTF8}.")


class _Lines:
    """What has been found so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_lines = 0
        self.num_with_blank = 0
        self.offsets: list[NDArray[np.int64]] = []
        self.numbers: list[NDArray[np.int64]] = []

    def add(self, chunk: bytes, offset: int) -> None:
        """Take whole lines that begin at a place in the file."""
        values = np.frombuffer(chunk, np.uint8)
        ends = np.flatnonzero(values == ord("\n"))
        if not chunk.endswith(b"\n"):
            ends = np.append(ends, len(chunk))
        starts = np.concatenate(([0], ends[:-1] + 1))
        used = np.flatnonzero(~_find_blank(chunk, values, starts, ends))
        chosen = used[-self.num_lines % LINES_PER_PIECE :: LINES_PER_PIECE]
        self.offsets.append(starts[chosen] + offset)
        self.numbers.append(chosen + self.num_with_blank)
        self.num_lines += len(used)
        self.num_with_blank += len(ends)

    def check_text(self, chunk: bytes) -> None:
        """Refuse a chunk that is not text, before it is added."""
        if b"\0" in chunk:
            raise UsageError(
                f"{self._path} is not a text file.",
                why=f"it has zero bytes, the first in line {self._number(chunk, chunk.index(0))}.",
                fix="Give a UTF-8 text file with one prompt a line.",
            )
        try:
            chunk.decode("utf-8")
        except UnicodeDecodeError as error:
            raise refuse_encoding(self._path, self._number(chunk, error.start), error) from error

    def _number(self, chunk: bytes, place: int) -> int:
        return self.num_with_blank + chunk.count(b"\n", 0, place) + 1


def _find_blank(
    chunk: bytes, values: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    lengths = ends - starts
    first = values[np.minimum(starts, len(values) - 1)]
    blank: NDArray[np.bool_] = (lengths == 0) | ((lengths == 1) & (first == ord("\r")))
    wide = np.flatnonzero(first >= _WIDE_SPACES[0] >> 8)
    pairs = (first[wide].astype(np.uint16) << 8) | values[np.minimum(starts[wide] + 1, len(values) - 1)]
    suspects = [np.flatnonzero((first <= ord(" ")) & ~blank), wide[np.isin(pairs, _WIDE_SPACES)]]
    for suspect in np.concatenate(suspects).tolist():
        blank[suspect] = _is_blank(chunk[starts[suspect] : ends[suspect]])
    return blank


def _is_blank(line: bytes) -> bool:
    content = line.strip()
    return not content or (int.from_bytes(content[:2]) in _WIDE_SPACES and content.decode(errors="replace").isspace())


def _scan(path: Path, file: BinaryIO, stamp: Stamp) -> LineIndex:
    lines, offset = _Lines(path), 0
    check_every = -(-stamp.num_bytes // _DECODED_BYTES)
    for order, chunk in enumerate(_read_chunks(path, file)):
        if order == 0:
            _check_start(path, chunk)
            if chunk.startswith(BOM):
                chunk, offset = chunk[len(BOM) :], len(BOM)
        is_last = offset + len(chunk) == stamp.num_bytes
        if order % check_every == 0 or is_last:
            lines.check_text(chunk)
        if chunk:
            lines.add(chunk, offset)
        offset += len(chunk)
    if Stamp.of(file) != stamp:
        raise UsageError(f"{path} changes while it is read.", fix="Wait until it is complete.")
    offsets, numbers = (np.concatenate(found or [np.zeros(0, np.int64)]) for found in (lines.offsets, lines.numbers))
    return LineIndex(path, stamp, lines.num_lines, offsets, numbers)


def _read_chunks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the file in pieces that end where a line ends."""
    rest = b""
    while read := file.read(_CHUNK_BYTES):
        cut = read.rfind(b"\n") + 1
        if cut:
            yield rest + read[:cut]
            rest = read[cut:]
        else:
            rest += read
        if len(rest) > LONGEST_LINE:
            _check_start(path, rest)
            raise UsageError(
                f"{path} has a line of more than {LONGEST_LINE // 2**20} MiB.",
                why=f"it begins {rest[:40].decode('utf-8', 'replace')!r}.",
                fix="Give a UTF-8 text file with one prompt a line.",
            )
    if rest:
        yield rest


def _check_start(path: Path, start: bytes) -> None:
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{path} is UTF-16, not UTF-8.", fix="Save it as UTF-8, for example with: iconv -f UTF-16 -t UTF-8.")
    if b"\r" in start.strip() and b"\n" not in start and b"\0" not in start:
        raise UsageError(
            f"{path} ends its lines with a carriage return alone.",
            why="that is how very old systems did it.",
            fix="Save it with usual line ends, for example with: tr '\\r' '\\n'.",
        )


def _cache_file(path: Path) -> CacheFile:
    return CacheFile(cache_path(path.parent / ".cache", path.name, ".lines.safetensors"), "pieces")


def _metadata(stamp: Stamp) -> dict[str, str]:
    return {
        "num_bytes": str(stamp.num_bytes),
        "modified_ns": str(stamp.modified_ns),
        "lines_per_piece": str(LINES_PER_PIECE),
        "version": _VERSION,
    }


def _read_kept(path: Path, stamp: Stamp, kept: CacheFile, required: list[Requirement]) -> LineIndex:
    pieces, metadata = kept.read(required)
    offsets, numbers = pieces.numpy()
    return LineIndex(path, stamp, int(metadata["num_lines"]), offsets, numbers)


def _keep(index: LineIndex, kept: CacheFile) -> None:
    pieces = torch.from_numpy(np.stack([index.offsets, index.numbers]))
    try:
        kept.write(pieces, {**_metadata(index.stamp), "num_lines": str(index.num_lines)})
    except (OutputError, UsageError) as error:
        say(f"Lines of {index.path} will be counted again next time: {error.what} {error.why}")
