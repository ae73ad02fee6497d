"""What a distillation refuses before anything is read."""

from contextlib import nullcontext

import pytest
import torch

from wandistiller.config.distill import DistillConfig
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import UsageError
from wandistiller.train.distill_job import _check_cards


@pytest.mark.parametrize(
    ("strategy", "ranks_here", "message"),
    [
        ("balanced", 4, "needs several GPUs, and each of 4 ranks has one"),
        ("custom", 2, "custom does not go with several ranks"),
        ("sequential", 2, None),
        ("balanced", 1, None),
    ],
)
def test_a_teacher_is_spread_over_the_cards_of_its_own_rank_alone(monkeypatch, strategy, ranks_here, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    config = DistillConfig(teacher_device_strategy=strategy)
    ranks = Ranks(1, ranks_here, 1, ranks_here)
    with nullcontext() if message is None else pytest.raises(UsageError, match=message):
        _check_cards(config, torch.device("cuda"), ranks)
