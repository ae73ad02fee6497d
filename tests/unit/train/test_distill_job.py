"""What a distillation refuses before anything is read."""

from contextlib import nullcontext

import pytest

from wandistiller.config.distill import DistillConfig
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import UsageError
from wandistiller.train.start_checks import check_spread_teacher


@pytest.mark.parametrize(
    ("strategy", "ranks_here", "message"),
    [
        ("balanced", 4, "needs several GPUs, and each of 4 ranks has one"),
        ("custom", 2, "custom does not go with several ranks"),
        ("sequential", 2, None),
        ("balanced", 1, None),
    ],
)
def test_a_teacher_is_spread_over_the_cards_of_its_own_rank_alone(strategy, ranks_here, message):
    config, ranks = DistillConfig(teacher_device_strategy=strategy), Ranks(1, ranks_here, 1, ranks_here)
    with nullcontext() if message is None else pytest.raises(UsageError, match=message):
        check_spread_teacher(config, ranks_here, len(ranks.cards(4)))
