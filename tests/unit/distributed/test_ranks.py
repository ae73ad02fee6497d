"""How ranks share work."""

import pytest

from wandistiller.distributed.ranks import Ranks, rank_device, read_ranks
from wandistiller.errors import UsageError


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_turns_are_as_many_on_every_rank_and_each_thing_counts_once(count, world_size):
    shares = [Ranks(rank, world_size).turns(count) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(number for share in shares for number, counts in share if counts) == list(range(count))
    assert all(0 <= number < count for share in shares for number, _ in share)


@pytest.mark.parametrize(("count", "here"), [(8, 8), (8, 2), (9, 2), (1, 1)])
def test_cards_of_a_machine_belong_to_one_rank_each(count, here):
    shares = [Ranks(local, here, local, here).cards(count) for local in range(here)]
    assert {len(share) for share in shares} == {count // here}
    assert len({card for share in shares for card in share}) == here * (count // here)


def test_a_rank_works_on_the_first_of_its_cards(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for name, value in (("RANK", 5), ("WORLD_SIZE", 6), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    assert rank_device("cuda", read_ranks()) == "cuda:2"
    assert rank_device("cpu", read_ranks()) == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UsageError, match="more ranks on this machine than its 4 GPUs"):
        rank_device("cuda", read_ranks())
