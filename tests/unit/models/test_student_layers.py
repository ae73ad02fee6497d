"""Which of the teacher's layers a student begins with."""

import itertools

import pytest
import torch

from wandistiller.errors import UsageError
from wandistiller.models.student_layers import block_influence, rank_layers, spread_layers


@pytest.mark.parametrize("total", range(1, 42))
def test_spread_layers_are_even_and_have_both_ends(total):
    for count in range(2, total + 1):
        layers = spread_layers(total, count)
        steps = [after - before for before, after in itertools.pairwise(layers)]
        assert len(layers) == count
        assert (layers[0], layers[-1]) == (0, total - 1)
        assert min(steps) >= 1
        assert max(steps) - min(steps) <= 1


def test_spread_to_one_and_to_all():
    assert spread_layers(8, 1) == (0,)
    assert spread_layers(8, 8) == tuple(range(8))


def test_the_highest_scores_and_both_ends():
    assert rank_layers([0.0, 0.9, 0.1, 0.5, 0.0], 3) == (0, 1, 4)
    assert rank_layers([0.0, 0.9, 0.1, 0.5, 0.0], 4) == (0, 1, 3, 4)
    assert rank_layers([9.0, 1.0, 1.0, 1.0, 9.0], 3) == (0, 1, 4)
    assert rank_layers([0.0, 0.9, 0.1], 2) == (0, 2)
    assert rank_layers([0.0, 0.9, 0.1], 1) == (1,)


@pytest.mark.parametrize("count", [0, 4])
def test_more_layers_than_there_are(count):
    for choose in (lambda: rank_layers([1.0, 2.0, 3.0], count), lambda: spread_layers(3, count)):
        with pytest.raises(UsageError, match="from 1 to 3"):
            choose()


def test_scores_that_are_none():
    with pytest.raises(UsageError, match="not finite"):
        rank_layers([1.0, float("nan"), 2.0], 2)


def test_influence_is_the_angle_that_a_block_turns_tokens_by():
    hidden = torch.randn(2, 5, 8)
    assert block_influence(hidden, 3 * hidden) == pytest.approx(0.0, abs=1e-6)
    assert block_influence(hidden, -hidden) == pytest.approx(2.0, abs=1e-6)
    assert block_influence(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]])) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="differ"):
        block_influence(hidden, hidden[:1])
