"""Stores, keepers and gradients on a device whose copies happen as late as somebody waits for them."""

import logging
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from wandistiller.memory.disk_store import DiskStore
from wandistiller.memory.gradients import HostGradients
from wandistiller.memory.host import HostBudget
from wandistiller.memory.kept import HostKeeper
from wandistiller.memory.layout import lay_out, named_tensors
from wandistiller.models.weight_files import Entry

CPU = torch.device("cpu")


class Late:
    """Work is done when somebody waits for its ticket, on the host or in the computation, and all work before it."""

    def __init__(self):
        self.pending = []

    def start(self, work, after):
        ticket = [work]
        self.pending.append(ticket)
        return ticket

    def wait(self, ticket):
        while ticket is not None and ticket in self.pending:
            self.pending.pop(0)[0]()

    wait_on_host = wait

    def mark(self):
        return None

    def guard(self, tensor):
        pass


def test_a_buffer_is_read_into_when_its_copy_to_the_device_is_done(tmp_path):
    file = Path(tmp_path / "weights")
    file.write_bytes(b"".join(bytes([index]) * 1024 for index in range(6)))
    layouts = [lay_out([("weight", torch.empty(1024, dtype=torch.uint8))]) for _ in range(6)]
    lane = Late()

    def locate(index, member):
        return Entry("weight", torch.uint8, (1024,), file, 1024 * index)

    store = DiskStore(layouts, lambda *_: None, CPU, locate, num_buffers=2, lane=lane)
    arrived = [torch.zeros(1024, dtype=torch.uint8) for _ in layouts]
    for index, target in enumerate(arrived):
        source = store.fetch(index)
        store.fetched(index, lane.start(lambda target=target, source=source: target.copy_(source), None))
    lane.wait(lane.pending[-1])
    store.close()
    assert [target.unique().tolist() for target in arrived] == [[index] for index in range(6)]


def test_what_comes_back_from_the_host_is_waited_for():
    keeper = HostKeeper(CPU, lane=Late(), min_bytes=1)
    kept = []
    for group in range(4):
        keeper.begin()
        kept.append([keeper.put(torch.full((64,), float(10 * group + number))) for number in range(2)])
    for group in reversed(range(4)):
        for number in range(2):
            assert keeper.get(kept[group][number]).unique().tolist() == [10 * group + number]


class Marking(Late):
    """Copies may not begin before the computation of what they copy, or of what used the memory before."""

    def __init__(self):
        super().__init__()
        self.latest = None
        self.waited = []

    def mark(self):
        self.latest = object()
        return self.latest

    def start(self, work, after):
        assert after is self.latest is not None, "nothing says when the copy may begin"
        self.latest = None
        return super().start(work, after)

    def wait(self, ticket):
        self.waited.append(ticket)
        super().wait(ticket)


def test_copies_of_what_is_kept_begin_after_the_computation_so_far():
    keeper = HostKeeper(CPU, lane=Marking(), min_bytes=1)
    keeper.begin()
    kept = keeper.put(torch.full((64,), 3.0))
    assert keeper.get(kept).unique().tolist() == [3.0]


def test_what_leaves_for_the_host_is_there_until_the_computation_has_waited_for_its_copy():
    lane = Marking()
    keeper = HostKeeper(CPU, lane=lane, min_bytes=1)
    keeper.begin()
    tensor = torch.zeros(64)
    storage = weakref.ref(tensor.untyped_storage())
    kept = keeper.put(tensor)
    (ticket,) = lane.pending
    del tensor
    keeper.begin()
    assert storage() is not None and ticket not in lane.waited
    keeper.begin()
    assert ticket in lane.waited
    assert keeper.get(kept).numel() == 64


def test_copies_of_gradients_begin_after_the_computation_so_far():
    block, lane = nn.Linear(4, 4), Marking()
    gradients = HostGradients([lay_out(named_tensors(block))], CPU, lambda *_: None, lane=lane)
    block(torch.ones(2, 4)).sum().backward()
    gradients.wait()
    gradients.close()


class Behind(Late):
    """A device that gets on with its copies only while the computing thread waits for one."""

    def start(self, work, after):
        work()
        self.pending.append(threading.Event())
        return self.pending[-1]

    def wait_on_host(self, ticket):
        if ticket is not None and threading.current_thread() is threading.main_thread():
            for earlier in self.pending[: self.pending.index(ticket) + 1]:
                earlier.set()
        elif ticket is not None:
            ticket.wait()


@pytest.mark.parametrize("unused", [None, 2], ids=["all", "one without a gradient"])
def test_gradients_of_two_blocks_at_most_are_on_a_device_that_is_behind(unused):
    blocks = [nn.Linear(4, 4) for _ in range(6)]
    gradients = HostGradients([lay_out(named_tensors(block)) for block in blocks], CPU, lambda *_: None, lane=Behind())
    gradients.stay = True
    there, most = [], 0

    def see(parameter, gradient):
        nonlocal most
        there.append(weakref.ref(gradient))
        most = max(most, sum(each() is not None for each in there))

    gradients.see = see
    value = torch.ones(2, 4)
    for index, block in enumerate(blocks):
        value = block(value) if index != unused else nn.functional.linear(value, block.weight)
    value.sum().backward()
    assert 2 <= most <= 4
    for item in (gradients._before, gradients._leaving):
        gradients._lane.wait_on_host(item.ticket)
    gradients.wait()
    gradients.close()
    assert not any(each() is not None for each in there)


def test_a_gradient_is_passed_on_when_it_has_arrived():
    blocks = [nn.Linear(4, 4) for _ in range(4)]
    seen = {}
    gradients = HostGradients(
        [lay_out(named_tensors(block)) for block in blocks],
        CPU,
        lambda parameter, gradient: seen.__setitem__(id(parameter), gradient.clone()),
        lane=Late(),
    )
    twins = [nn.Linear(4, 4) for _ in blocks]
    for block, twin in zip(blocks, twins, strict=True):
        twin.load_state_dict(block.state_dict())
    x = torch.randn(3, 4)
    for each in (blocks, twins):
        nn.Sequential(*each)(x).square().sum().backward()
    gradients.wait()
    gradients.close()
    for block, twin in zip(blocks, twins, strict=True):
        assert all(torch.equal(seen[id(a)], b.grad) for a, b in zip(block.parameters(), twin.parameters(), strict=True))


def test_a_cap_on_page_locked_memory_is_kept_and_told_once(caplog):
    budget = HostBudget(100)
    with caplog.at_level(logging.WARNING):
        assert [budget.take(size) for size in (60, 60, 50, 40, 1)] == [True, False, False, True, False]
    assert [record.getMessage().count("the cap on page-locked memory is reached") for record in caplog.records] == [1]
