"""Prompts from files of every make, against what Python's own text reading gives."""

import pickle
import random

import numpy as np
import pytest
import torch

from wandistiller.data import line_index
from wandistiller.data.prompts import PromptFile, open_prompts
from wandistiller.data.sources import WorldSource
from wandistiller.errors import UsageError


def write(folder, content):
    path = folder / "prompts.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def expected_of(content):
    """What is blank is whatever Unicode calls so; around a prompt only ASCII's white space is taken away."""
    return [line.strip(" \t\r\n\v\f") for line in content.removeprefix("\ufeff").split("\n") if line.strip()]


@pytest.mark.parametrize(
    "content",
    [
        "one",
        "one\ntwo\n",
        "one\r\ntwo\r\n\r\n three \r\n",
        "\ufeffone\ntwo",
        "\ufeff\n\n  \t\none\n",
        "\n\n\none\n\n \n\n  two\x0bhalf\n",
        "\u00a0\none\n\u3000\u3000\r\n \u2003\t\n\u3000 \n\u00a0two\n\u3002\n\u00a7\n\u205f\n“three”\n\u1680\u0085",
        "ein Bär\n一只红色的气球\n\u3000全角\n🎈 a\u2028b\n",
    ],
)
def test_lines_of_every_make(tmp_path, content):
    prompts = PromptFile(write(tmp_path, content))
    expected = expected_of(content)
    assert [prompts.prompt(index) for index in range(len(prompts))] == expected
    with pytest.raises(IndexError):
        prompts.prompt(len(prompts))
    with pytest.raises(IndexError):
        prompts.prompt(-1)
    number = 1 + next(n for n, line in enumerate(content.removeprefix("\ufeff").split("\n")) if line.strip())
    assert prompts.name(0) == f"prompts.txt, line {number}"


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 2**18])
def test_lines_are_found_wherever_a_chunk_ends(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(line_index, "_CHUNK_BYTES", chunk_bytes)
    draw = random.Random(0)
    kinds = ["", " ", "\r", "\t \r", "\u3000", "\u00a0\r", "a", "ä prompt", "  气球\r", "x" * 90]
    lines = [draw.choice(kinds) for _ in range(3000)]
    content = "\ufeff" + "\n".join([*lines, "last"])
    prompts = PromptFile(write(tmp_path, content))
    expected = expected_of(content)
    assert len(prompts) == len(expected) > 5 * line_index.LINES_PER_PIECE
    order = list(range(len(expected)))
    draw.shuffle(order)
    assert all(prompts.prompt(index) == expected[index] for index in order)
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    assert all(prompts.name(index) == f"prompts.txt, line {numbers[index]}" for index in order[:500] if index < len(numbers))


def test_other_processes_read_the_same(tmp_path):
    prompts = PromptFile(write(tmp_path, "".join(f"prompt {n}\n" for n in range(1000))))
    assert prompts.prompt(999) == "prompt 999"
    copy = pickle.loads(pickle.dumps(prompts))
    assert copy._piece is None
    assert [copy.prompt(index) for index in (0, 500, 999)] == ["prompt 0", "prompt 500", "prompt 999"]
    loader = torch.utils.data.DataLoader(
        range(1000), batch_size=8, num_workers=1, collate_fn=lambda batch: [prompts.prompt(n) for n in batch]
    )
    assert [text for batch in loader for text in batch] == [f"prompt {n}" for n in range(1000)]


def test_the_index_of_a_large_file_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(line_index, "_KEEP_FROM_BYTES", 1000)
    path = write(tmp_path, "".join(f"prompt {n}\n\n" for n in range(1000)))
    assert len(PromptFile(path)) == 1000
    assert (tmp_path / ".cache" / "prompts.txt.lines.safetensors").is_file()
    with monkeypatch.context() as only:
        only.setattr(line_index, "_scan", lambda *args: pytest.fail("the file was read again"))
        again = PromptFile(path)
        assert (len(again), again.prompt(700), again.name(700)) == (1000, "prompt 700", "prompts.txt, line 1401")
    write(tmp_path, "".join(f"other {n}\n" for n in range(900)))
    with pytest.raises(UsageError, match="has changed while it was in use"):
        again.prompt(1)
    assert PromptFile(path).prompt(899) == "other 899"
    kept = tmp_path / ".cache" / "prompts.txt.lines.safetensors"
    kept.write_bytes(kept.read_bytes()[:-8])
    assert PromptFile(path).prompt(899) == "other 899"


def test_a_small_file_leaves_nothing_beside_it(tmp_path):
    PromptFile(write(tmp_path, "one\n"))
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"\n \r\n\t\n", "has only blank lines"),
        (b"\xef\xbb\xbf", "has only blank lines"),
        ("\u00a0\n\u3000".encode(), "has only blank lines"),
        (b"one\n\ntw\xf6\n", "line 3 is not UTF-8"),
        ("one\ntwo\n".encode("utf-16"), "is UTF-16"),
        (b"one\ntwo\x00\x01\n", "is not a text file"),
        (b"one\rtwo\rthree\r", "carriage return alone"),
        (b"x" * (2**20 + 2**18 + 2), "a line of more than 1 MiB"),
    ],
)
def test_what_is_not_a_prompt_file_is_refused(tmp_path, content, what):
    path = write(tmp_path, content)
    with pytest.raises(UsageError, match=what) as caught:
        open_prompts(path)
    assert str(path) in caught.value.what
    assert caught.value.fix
    assert caught.value.exit_code == 2


def test_what_is_no_file_is_refused(tmp_path):
    path = write(tmp_path, "one")
    with pytest.raises(UsageError, match="does not exist") as caught:
        open_prompts(tmp_path / "promts.txt")
    assert "Did you mean 'prompts.txt'?" in caught.value.fix
    with pytest.raises(UsageError, match="is a folder") as caught:
        open_prompts(tmp_path)
    assert str(path) in caught.value.fix
    with pytest.raises(UsageError, match="does not exist") as caught:
        open_prompts(tmp_path / "none" / "prompts.txt")
    assert f"There is no folder {tmp_path / 'none'}" in caught.value.fix
    with pytest.raises(UsageError, match="does not exist") as caught:
        open_prompts("world:many")
    assert "world:COUNT:FRAMESxHEIGHTxWIDTH" in caught.value.fix
    with pytest.raises(UsageError, match="is JSON"):
        open_prompts(path.rename(tmp_path / "prompts.jsonl"))


def test_a_line_that_was_not_checked_is_refused_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(line_index, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(line_index, "_DECODED_BYTES", 100)
    lines = [f"prompt {n}".encode() for n in range(100)]
    for number in (0, 99):
        spoilt = [*lines[:number], b"B\xe4r", *lines[number + 1 :]]
        with pytest.raises(UsageError, match=f"line {number + 1} is not UTF-8"):
            PromptFile(write(tmp_path, b"\n".join(spoilt)))
    lines[9] = b"B\xe4r"
    prompts = PromptFile(write(tmp_path, b"\n".join(lines)))
    assert prompts.prompt(8) == "prompt 8"
    with pytest.raises(UsageError, match="line 10 is not UTF-8") as caught:
        prompts.prompt(9)
    assert "0xe4" in caught.value.why


def test_the_captions_of_the_world_are_prompts():
    prompts = open_prompts("world:6:1+9x32x32", seed=3)
    source = WorldSource(6, frames=(1, 9), seed=3)
    assert [prompts.prompt(index) for index in range(len(prompts))] == [source.caption(index) for index in range(6)]
    assert prompts.name(2) == source.name(2)
    assert pickle.loads(pickle.dumps(prompts)).prompt(5) == source.caption(5)
    with pytest.raises(UsageError, match="empty world"):
        open_prompts("world:0:1x32x32")


def test_an_index_is_small(tmp_path):
    prompts = PromptFile(write(tmp_path, "a prompt of some words\n" * 100_000))
    assert len(pickle.dumps(prompts)) < 100_000 * 0.2
    assert prompts._index.offsets.dtype == np.int64
