"""How ranks share work."""

import pytest

from wandistiller.distributed.ranks import Ranks


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_turns_are_as_many_on_every_rank_and_each_thing_counts_once(count, world_size):
    shares = [Ranks(rank, world_size).turns(count) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(number for share in shares for number, counts in share if counts) == list(range(count))
    assert all(0 <= number < count for share in shares for number, _ in share)
