"""Ranks of one attempt meet, whatever earlier attempts have left in the store and however machines count them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from wandistiller.distributed.meeting import meet
from wandistiller.errors import RankError


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def attempt(store, ranks, world_size, timeout=20.0):
    """Return each rank's part of the store; some have torchrun's prefix of one count, some of another."""

    def one(rank):
        return meet(dist.PrefixStore(f"/worker/attempt_{rank % 2}", store.clone()), rank, world_size, timeout)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_all_have_one_part_and_each_attempt_its_own(store):
    for number in range(3):
        parts = attempt(store, [2, 0, 1, 3], 4)
        assert not parts[0].check(["word"]), "nothing of an earlier attempt is there"
        parts[0].set("word", str(number))
        assert [part.get("word") for part in parts] == [str(number).encode()] * 4


def test_a_rank_that_comes_before_the_new_first_one_waits_for_it(store):
    attempt(store, [0, 1], 2)
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(meet, store.clone(), 1, 2, 20.0)
        threading.Event().wait(0.3)
        assert not early.done(), "the first rank of the last attempt does not count"
        first = meet(store.clone(), 0, 2, 20.0)
        first.set("word", "now")
        assert early.result().get("word") == b"now"


def test_who_does_not_come_is_named(store):
    with pytest.raises(RankError, match="Of 4 ranks, 2 did not come: 2, 3"):
        attempt(store, [0, 1], 4, timeout=0.5)
    with pytest.raises(RankError, match="Rank 1 has waited for the others"):
        meet(store, 1, 2, 0.3)
