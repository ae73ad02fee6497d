"""What a process does is said, and stays said if it fails."""

import pytest

from wandistiller import doing


def test_what_is_noted_comes_back():
    doing.note("outside")
    with doing.noted("inside", waits_for_ranks=True):
        assert (doing.now().what, doing.now().waits_for_ranks) == ("inside", True)
    assert (doing.now().what, doing.now().waits_for_ranks) == ("outside", False)


def test_what_failed_stays_said():
    with pytest.raises(ValueError), doing.noted("outside"), doing.noted("inside"):
        raise ValueError
    assert doing.now().what == "inside"
    assert doing.now().seconds >= 0
