"""The watch on a student: when it warns, when it does not, and in which words."""

from types import SimpleNamespace

import pytest

from wandistiller.distributed.ranks import Ranks
from wandistiller.train.health import WatchHealth

# The values just inside of each range and just outside, with what is said of the latter.
EDGES = {
    "health/spread": ((0.5, 0.49, "averages"), (2.0, 2.01, "noise")),
    "health/saturation": ((-0.05, -0.06, "flat"), (0.05, 0.06, "burnt")),
    "health/motion": ((0.3, 0.29, "stand still"), (3.0, 3.01, "flicker")),
}
WORDS = {words for edges in EDGES.values() for _, _, words in edges}


def watch(values, start=20, rank=0, warmup_steps=20):
    """Return what was said of values of successive logging intervals, ten steps each."""
    watcher = WatchHealth(warmup_steps)
    for number, each in enumerate(values):
        watcher.logged(SimpleNamespace(step=start + 10 * number, ranks=Ranks(rank, 2)), each)
    return watcher.warnings


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("end", [0, 1])
def test_each_range_has_two_ends_and_words_for_each(name, end):
    inside, outside, words = EDGES[name][end]
    assert watch([{name: inside}] * 5) == []
    (warning,) = watch([{name: outside}] * 5)
    assert "collapsing" in warning and words in warning
    assert not any(other in warning for other in WORDS - {words})


def test_the_number_is_said():
    (warning,) = watch([{"health/spread": 78.99}] * 3)
    assert "7899%" in warning and "averages" not in warning
    (warning,) = watch([{"health/saturation": 0.25}] * 3)
    assert "25%" in warning


def test_it_warns_at_the_third_bad_interval_in_a_row_and_once():
    bad, good = {"health/spread": 0.1}, {"health/spread": 1.0}
    assert watch([bad, bad]) == []
    assert watch([bad, bad, good, bad, bad]) == []
    assert len(watch([bad, bad, bad])) == 1
    assert len(watch([bad] * 9)) == 1


def test_numbers_are_counted_each_for_itself():
    spread, motion = {"health/spread": 0.1}, {"health/motion": 0.1}
    assert watch([spread, motion, spread, motion]) == []
    assert len(watch([{**spread, **motion}] * 3)) == 2


def test_an_interval_without_a_number_says_nothing_of_it():
    """Pictures have no motion: clips among them go on where they were."""
    bad = {"health/motion": 9.0}
    assert len(watch([bad, {}, bad, {}, bad])) == 1


def test_the_first_steps_do_not_count():
    bad = {"health/spread": 0.1}
    assert watch([bad] * 4, start=0) == []  # steps 0, 10, 20 and 30, of which two count
    assert len(watch([bad] * 5, start=0)) == 1
    assert len(watch([bad] * 3, start=0, warmup_steps=0)) == 1


def test_one_rank_speaks_for_all(capsys):
    bad = [{"health/spread": 0.1}] * 3
    watch(bad, rank=1)
    assert capsys.readouterr().err == ""
    watch(bad)
    assert capsys.readouterr().err.startswith("Warning: the student is collapsing")


def test_a_healthy_student_is_left_alone():
    assert watch([{"health/spread": 1.0, "health/saturation": 0.0, "health/motion": 1.0, "loss": 99.0}] * 9) == []
