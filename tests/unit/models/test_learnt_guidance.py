"""The guidance that a student has learnt comes back as it was written, and what cannot be one is refused."""

import pytest

from wandistiller.errors import CheckpointError
from wandistiller.models.learnt_guidance import LEARNT_GUIDANCE_NAME, read_learnt_guidance, write_learnt_guidance


@pytest.mark.parametrize("scale", [None, 5.0])
def test_it_comes_back(tmp_path, scale):
    write_learnt_guidance(tmp_path, scale)
    assert read_learnt_guidance(tmp_path) == scale
    assert bool(list(tmp_path.iterdir())) is (scale is not None)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"guidance_scale": "much"}'])
def test_a_damaged_one(tmp_path, content):
    (tmp_path / LEARNT_GUIDANCE_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=LEARNT_GUIDANCE_NAME):
        read_learnt_guidance(tmp_path)
