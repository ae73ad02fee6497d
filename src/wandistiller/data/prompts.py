"""Prompts by number: the lines of a text file, or the captions of a source such as the procedural world."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from wandistiller.data.line_index import LINES_PER_PIECE, Line, index_lines, refuse_encoding
from wandistiller.data.sources import Source, is_world, open_source
from wandistiller.errors import UsageError, nearest
from wandistiller.files import expand_home

_ONE_A_LINE = "Give a UTF-8 text file with one prompt a line"
_OTHER_KINDS = {
    ".json": "JSON",
    ".jsonl": "JSON",
    ".csv": "a table",
    ".tsv": "a table",
    ".parquet": "a table",
    ".gz": "compressed",
    ".zst": "compressed",
    ".zip": "compressed",
}


class Prompts(Protocol):
    """Prompts by number. They can be sent to other processes."""

    def __len__(self) -> int: ...

    def prompt(self, index: int) -> str:
        """Return a prompt without white space around it."""
        ...

    def name(self, index: int) -> str:
        """Return what a message calls a prompt."""
        ...


def open_prompts(path: str | Path, *, seed: int = 0) -> Prompts:
    """Open a text file with one prompt a line, or the captions of ``world:COUNT:FRAMESxHEIGHTxWIDTH``.

    ``seed`` is the world's. Raises ``UsageError`` for what cannot be used.
    """
    if is_world(path):
        return CaptionPrompts(open_source(path, seed=seed).source)
    return PromptFile(path)


class CaptionPrompts:
    """The captions of a source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def prompt(self, index: int) -> str:
        return self._source.caption(_within(index, len(self)))

    def name(self, index: int) -> str:
        return self._source.name(_within(index, len(self)))


class PromptFile:
    """A UTF-8 text file with one prompt a line; blank lines do not count.

    Neither the text nor the place of every line is kept in memory: see ``line_index``.
    """

    def __init__(self, path: str | Path) -> None:
        """Find and check the lines; raise ``UsageError`` for what is not such a file.

        Of a file beyond a quarter of a gigabyte only as much is checked for UTF-8, and the rest when it is read.
        """
        self.path = expand_home(path).absolute()
        _check_kind(path, self.path)
        self._index = index_lines(self.path)
        self._piece: tuple[int, list[Line]] | None = None
        if not len(self):
            what = "has only blank lines" if self._index.stamp.num_bytes else "is empty"
            raise UsageError(f"{path} {what}.", fix="Write one prompt a line.")

    def __len__(self) -> int:
        return self._index.num_lines

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_piece": None}

    def prompt(self, index: int) -> str:
        line = self._line(index)
        try:
            return line.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise refuse_encoding(self.path, line.number, error) from error

    def name(self, index: int) -> str:
        return f"{self.path.name}, line {self._line(index).number}"

    def _line(self, index: int) -> Line:
        number, place = divmod(_within(index, len(self)), LINES_PER_PIECE)
        # Prompts are often asked for in order, and their names after them.
        piece = self._piece
        if piece is None or piece[0] != number:
            piece = self._piece = (number, self._index.read_piece(number))
        return piece[1][place]


def _within(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"prompt {index} of {length}")
    return index


def _check_kind(given: str | Path, path: Path) -> None:
    if path.is_dir():
        texts = sorted(child.name for child in path.glob("*.txt"))[:1]
        hint = f", such as {Path(given) / texts[0]}" if texts else ""
        raise UsageError(f"{given} is a folder.", why="prompts are read from a file.", fix=f"{_ONE_A_LINE}{hint}.")
    if not path.exists():
        if str(given).startswith("world"):
            hint = " The world is written world:COUNT:FRAMESxHEIGHTxWIDTH."
        else:
            near = nearest(path.name, (child.name for child in path.parent.iterdir())) if path.parent.is_dir() else ""
            hint = f" There is no folder {path.parent}." if not path.parent.is_dir() else near and f" {_sentence(near)}"
        raise UsageError(f"{given} does not exist.", fix=f"Check the path for a typing error.{hint}")
    if not path.is_file():
        raise UsageError(f"{given} is not a file.", fix=f"{_ONE_A_LINE}.")
    kind = _OTHER_KINDS.get(path.suffix.lower())
    if kind is not None:
        raise UsageError(f"{given} is {kind}, by its name.", fix=f"{_ONE_A_LINE}, in a .txt file.")


def _sentence(question: str) -> str:
    text = question.lstrip("; ")
    return text[0].upper() + text[1:]
