"""Threads on the host: every piece once, in their order, and PyTorch's own number of threads left alone."""

import threading

import pytest
import torch

from wandistiller.memory.host_threads import PIECE, HostThreads, default_num_threads


@pytest.fixture
def threads():
    found = HostThreads(3)
    yield found
    found.close()


def test_every_piece_is_done_once_and_given_back_in_its_place(threads):
    numbers = torch.zeros(1000)

    def do(index, room):
        numbers[index] += 1
        assert room.numel() == PIECE and room.dtype == torch.float32
        return index

    works = [threads.begin(do, 1000) for _ in range(5)]
    assert [work.wait() for work in works] == [list(range(1000))] * 5
    assert torch.equal(numbers, torch.full((1000,), 5.0))


def test_work_of_a_lower_order_goes_before_what_waits_already():
    threads, order, gate = HostThreads(1), [], threading.Event()
    first = threads.begin(lambda index, room: gate.wait(), 1)
    late = threads.begin(lambda index, room: order.append(f"late {index}"), 2, order=7)
    for name, number in (("soon", 3), ("now", -1), ("soon too", 3)):
        threads.begin(lambda index, room, name=name: order.append(f"{name} {index}"), 2, order=number)
    gate.set()
    first.wait(), late.wait()
    names = ["now", "soon", "soon too", "late"]
    assert order == [f"{name} {index}" for name in names for index in range(2)]
    threads.close()


def test_an_error_comes_out_where_somebody_waits_and_what_follows_is_done_all_the_same(threads):
    after = threading.Event()

    def do(index, room):
        if index == 3:
            raise ValueError("piece 3")

    work = threads.begin(do, 10, then=after.set)
    with pytest.raises(ValueError, match="piece 3"):
        work.wait()
    assert after.is_set()
    assert threads.begin(lambda index, room: index, 2).wait() == [0, 1], "the threads go on"


def test_no_pieces_are_done_at_once(threads):
    after = threading.Event()
    assert threads.begin(lambda index, room: None, 0, then=after.set).wait() == []
    assert after.is_set()


def test_each_thread_has_one_core_and_the_others_keep_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = HostThreads(2)
        assert set(threads.begin(lambda index, room: torch.get_num_threads(), 8).wait()) == {1}
        seen = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start(), other.join()
        assert (torch.get_num_threads(), seen) == (2, [2])
        threads.close()
    finally:
        torch.set_num_threads(before)


def test_closing_ends_the_threads_when_everything_is_done():
    threads, done = HostThreads(2), []
    threads.begin(lambda index, room: done.append(index), 50)
    threads.close()
    assert sorted(done) == list(range(50))
    assert not any(thread.is_alive() for thread in threads._threads)


def test_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert default_num_threads() == 15
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_num_threads() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert default_num_threads() == 1
