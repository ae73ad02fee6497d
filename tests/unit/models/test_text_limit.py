"""The limit of captions comes back as it was written, and what cannot be one is refused."""

import pytest

from wandistiller.errors import CheckpointError
from wandistiller.models.text_limit import TEXT_LIMIT_NAME, read_text_limit, write_text_limit


def test_it_comes_back(tmp_path):
    write_text_limit(tmp_path, 77)
    assert read_text_limit(tmp_path) == 77


def test_whole_captions_leave_no_file(tmp_path):
    write_text_limit(tmp_path, 512)
    assert not list(tmp_path.iterdir())
    assert read_text_limit(tmp_path) == 512


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"text_max_length": 0}', '{"text_max_length": "77"}'])
def test_a_damaged_one(tmp_path, content):
    (tmp_path / TEXT_LIMIT_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=TEXT_LIMIT_NAME):
        read_text_limit(tmp_path)
