"""How a distillation puts its parts together."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wandistiller.train.distill_run import _match_blocks, _score_layers
from wandistiller.train.students import Student


def test_each_block_follows_the_teacher_up_to_where_the_next_one_comes_from():
    """A student of layers 0, 2 and 5 of eight does the work of 0 and 1, of 2 to 4, and of 5 to 7."""
    channels = torch.tensor([1, 4])
    matched = _match_blocks(Student(torch.nn.Identity(), (0, 2, 5), channels), 8)
    assert (list(matched.student), list(matched.teacher)) == ([0, 1, 2], [1, 4, 7])
    assert matched.channels is channels
    assert _match_blocks(Student(torch.nn.Identity()), 8) is None, "random weights follow nobody"


@pytest.mark.parametrize(("experts", "low"), [(["high"], 0.0), (["high", "low"], 0.875)])
def test_layers_are_scored_on_questions_for_the_expert_that_they_are_of(monkeypatch, experts, low):
    seen = {}

    def score(folder, stored, *others, **options):
        seen.update(options, stored=stored)
        return [1.0]

    monkeypatch.setattr("wandistiller.train.distill_run.score_layers", score)
    config = SimpleNamespace(output_dir=Path("run"), seed=0)
    job = SimpleNamespace(config=config, pipeline=SimpleNamespace(boundary=0.875), teachers=experts, device=torch.device("cpu"))
    assert _score_layers(job, [], object(), None) == [1.0]
    assert (seen["stored"], seen["low"]) == ("high", low)
