"""Files read at full speed: every byte once, and no more than was asked for."""

import os

import pytest

from wandistiller.memory.disk_store import PIECE_BYTES
from wandistiller.memory.raw_reads import read_files, read_rate


@pytest.fixture
def files(tmp_path):
    """Return two files, of a piece and a bit, and of three bytes."""
    sizes = {"a": PIECE_BYTES + 5, "b": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    return [tmp_path / name for name in sizes]


@pytest.mark.parametrize(
    ("options", "expected"), [({}, PIECE_BYTES + 8), ({"at_most": PIECE_BYTES}, PIECE_BYTES), ({"seconds": -1.0}, 0)]
)
def test_every_byte_is_read_once(files, options, expected):
    assert read_files(files, num_threads=2, **options) == expected


def test_a_rate_is_of_bytes_that_were_read(files):
    assert read_rate(files[0]) > 1e6
