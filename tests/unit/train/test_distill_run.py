"""How a distillation puts its parts together."""

import torch

from wandistiller.train.distill_run import _match_blocks
from wandistiller.train.students import Student


def test_each_block_follows_the_teacher_up_to_where_the_next_one_comes_from():
    """A student of layers 0, 2 and 5 of eight does the work of 0 and 1, of 2 to 4, and of 5 to 7."""
    channels = torch.tensor([1, 4])
    matched = _match_blocks(Student(torch.nn.Identity(), (0, 2, 5), channels), 8)
    assert (list(matched.student), list(matched.teacher)) == ([0, 1, 2], [1, 4, 7])
    assert matched.channels is channels
    assert _match_blocks(Student(torch.nn.Identity()), 8) is None, "random weights follow nobody"
