"""What is kept beside a student's weights comes back as it was written, and what cannot be is refused."""

import pytest

from wandistiller.errors import CheckpointError
from wandistiller.models.student_facts import (
    FACT_FILES,
    read_learnt_guidance,
    read_text_limit,
    write_learnt_guidance,
    write_text_limit,
)

TEXT_LIMIT_NAME, GUIDANCE_NAME = FACT_FILES


def test_a_limit_comes_back(tmp_path):
    write_text_limit(tmp_path, 77)
    assert read_text_limit(tmp_path) == 77
    assert (tmp_path / "text_max_length.json").read_text() == '{"text_max_length": 77}\n', "as it has always been"


def test_whole_captions_leave_no_file(tmp_path):
    write_text_limit(tmp_path, 512)
    assert not list(tmp_path.iterdir())
    assert read_text_limit(tmp_path) == 512


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"text_max_length": 0}', '{"text_max_length": "77"}'])
def test_a_damaged_limit(tmp_path, content):
    (tmp_path / TEXT_LIMIT_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=TEXT_LIMIT_NAME):
        read_text_limit(tmp_path)


@pytest.mark.parametrize("scale", [None, 5.0])
def test_guidance_comes_back(tmp_path, scale):
    write_learnt_guidance(tmp_path, scale)
    assert read_learnt_guidance(tmp_path) == scale
    assert bool(list(tmp_path.iterdir())) is (scale is not None)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"guidance_scale": "much"}'])
def test_damaged_guidance(tmp_path, content):
    (tmp_path / GUIDANCE_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=GUIDANCE_NAME):
        read_learnt_guidance(tmp_path)
