"""Ranks that keep an eye on each other: silence and a lost store are noticed in time, and named."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks

from wandistiller import doing
from wandistiller.distributed.watch import Watch


class Job:
    """Ranks of one process, each with a watch of its own."""

    def __init__(self, count, timeout, **options):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
        self.errors, self.ended = {}, threading.Event()
        self.watches = [Watch(self.store, rank, count, timeout, self.note(rank), **options) for rank in range(count)]
        for each in self.watches:
            each.start()

    def note(self, rank):
        def end(error):
            self.errors[rank] = error
            self.ended.set()

        return end


@pytest.fixture
def job():
    made = []

    def make(*arguments, **options):
        made.append(Job(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        for one in each.watches:
            one.stop()


def test_ranks_that_live_are_left_alone(job):
    found = job(3, 4.0)
    assert not found.ended.wait(4.0)


def test_a_silent_rank_is_named_with_what_it_did(job):
    found = job(3, 3.0)
    with doing.noted("in step 7, exchanging gradients"):
        time.sleep(0.7)
        found.watches[1].stop()  # as one that is stopped: it says nothing of it
        assert not found.ended.wait(1.0), "a short silence is forgiven"
        assert found.ended.wait(10)
    message = str(next(iter(found.errors.values())))
    assert message.startswith("Rank 1 has been silent for 2 s.")
    assert "before that in step 7, exchanging gradients" in message and "--resume auto" in message
    assert "rank 0" in message and "rank 2" in message


def test_a_lost_store_is_noticed_though_its_reader_hangs(job):
    found = job(2, 3.0)
    found.watches[0]._store = type("Hanging", (), {"set": lambda *a: threading.Event().wait()})()
    assert found.ended.wait(10)
    assert "no contact with the job" in str(found.errors[0])


def test_a_rank_on_a_card_that_waits_in_vain_is_ended_before_nccl_aborts_it(job):
    found = job(2, 1.5, ends_waiting=True)
    with doing.noted("encoding"):
        assert not found.ended.wait(3.0), "what waits for nobody may take its time"
    with doing.noted("in step 7, exchanging gradients", waits_for_ranks=True):
        assert found.ended.wait(10)
    message = str(next(iter(found.errors.values())))
    assert message.startswith("Ranks have waited for each other for more than")
    assert "in step 7, exchanging gradients" in message and "--rank-timeout" in message


def leave_early(seconds):
    import torch

    from wandistiller.distributed.ranks import joined

    with joined(torch.device("cpu"), 4.0) as ranks:
        if ranks.is_first:
            time.sleep(seconds)


def test_a_rank_that_is_done_waits_in_peace(tmp_path):
    """Longer than a rank may be silent, and shorter than it may wait."""
    run_ranks(2, leave_early, 3.0, folder=tmp_path)


def wait_long(seconds):
    import torch

    from wandistiller.distributed.ranks import joined

    with joined(torch.device("cpu"), 2.0) as ranks:
        for turn in range(2):
            if ranks.rank == turn:
                time.sleep(seconds)
            ranks.wait_long()


def test_ranks_wait_longer_for_one_than_a_collective_may_take(tmp_path):
    run_ranks(2, wait_long, 3.0, folder=tmp_path)
