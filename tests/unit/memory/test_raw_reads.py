"""Files read at full speed: every byte once, and no more than was asked for."""

import os
import threading
from types import SimpleNamespace

import pytest

from wandistiller.memory import raw_reads
from wandistiller.memory.disk_store import PIECE_BYTES, DiskStore
from wandistiller.memory.raw_reads import forgetting, read_files, read_rate


@pytest.fixture
def files(tmp_path):
    """Return two files, of a piece and a bit, and of three bytes."""
    sizes = {"a": PIECE_BYTES + 5, "b": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    return [tmp_path / name for name in sizes]


def test_files_are_forgotten_again_and_again_while_they_are_read(files, monkeypatch):
    forgotten, thrice = [], threading.Event()

    def forget(dropped):
        forgotten.append(dropped)
        if len(forgotten) == 3:
            thrice.set()

    monkeypatch.setattr(raw_reads, "forget_files", forget)
    with forgetting([]):
        pass
    assert not forgotten
    with pytest.raises(ValueError, match="of a step"), forgetting(files, every=0.01):
        assert thrice.wait(60)
        raise ValueError("of a step")
    count = len(forgotten)
    assert not any(thread.name == "wandistiller-forget" for thread in threading.enumerate())
    assert len(forgotten) == count and all(dropped == files for dropped in forgotten)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_byte_is_read_once(files, num_threads):
    assert read_files(files, num_threads=num_threads) == PIECE_BYTES + 8


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({}, PIECE_BYTES + 8), ({"at_most": PIECE_BYTES}, PIECE_BYTES + 5), ({"seconds": -1.0}, PIECE_BYTES + 5)],
)
def test_a_rate_is_of_bytes_that_were_read(files, limits, expected, monkeypatch):
    clock = SimpleNamespace(perf_counter=iter([10.0, 12.0, 14.0]).__next__)
    monkeypatch.setattr("wandistiller.memory.raw_reads.time", clock)
    taken = 2.0 if expected == PIECE_BYTES + 5 else 4.0
    assert read_rate(files, **{"seconds": 60.0, **limits}) == expected / taken


def test_what_is_streamed_is_what_the_file_holds(files, monkeypatch):
    found = []
    fetch = DiskStore.fetch
    monkeypatch.setattr(DiskStore, "fetch", lambda store, index: found.append(fetch(store, index).clone()) or found[-1])
    read_rate(files)
    whole = b"".join(bytes(each.numpy()) for each in found)
    first, second = (file.read_bytes() for file in files)
    assert whole.startswith(first) and second in whole
