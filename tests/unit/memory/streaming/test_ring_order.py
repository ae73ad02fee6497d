"""The ring's ordering, proved on a simulated device that runs its two queues in any order that the tickets allow.

Computation and copies are only recorded while the program runs, as on a real device, and executed afterwards: copies as early
as they may, computation as early as it may, or interleaved at random. Each block's computation looks at the weights that are in
its slot at that moment.
"""

import random

import pytest
import torch
from torch import nn

from wandistiller.memory.streaming import stream_blocks


class SimulatedDevice:
    """Two queues; an operation runs when its queue has reached it and the operation that it waits for is done."""

    def __init__(self):
        self.queues = {"compute": [], "copy": []}
        self.done = {"compute": 0, "copy": 0}

    def put(self, queue, work, needs=None):
        self.queues[queue].append((work, needs))
        return queue, len(self.queues[queue])

    def start(self, work, after):
        return self.put("copy", work, after)

    def wait(self, ticket):
        self.put("compute", lambda: None, ticket)

    def mark(self):
        return "compute", len(self.queues["compute"])

    def wait_on_host(self, ticket):
        raise AssertionError("the host waited")

    def guard(self, tensor):
        pass

    def can_run(self, queue):
        if self.done[queue] == len(self.queues[queue]):
            return False
        needs = self.queues[queue][self.done[queue]][1]
        return needs is None or self.done[needs[0]] >= needs[1]

    def run(self, choose):
        while ready := [queue for queue in self.queues if self.can_run(queue)]:
            queue = choose(ready)
            self.queues[queue][self.done[queue]][0]()
            self.done[queue] += 1
        assert all(self.done[queue] == len(self.queues[queue]) for queue in self.queues), "deadlock"


class Block(nn.Module):
    def __init__(self, index, device, seen):
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), float(index)), requires_grad=False)
        self.index, self.device, self.seen = index, device, seen

    def forward(self, x):
        self.compute()
        return x

    def compute(self):
        self.device.put("compute", lambda: self.seen.append((self.index, self.weight.unique().tolist())))


ORDERS = {
    "copies first": lambda ready: "copy" if "copy" in ready else "compute",
    "computation first": lambda ready: "compute" if "compute" in ready else "copy",
    **{f"random {seed}": random.Random(seed).choice for seed in range(20)},
}


def passes(order, num_blocks, num_slots, resident, device=None, training=False):
    device, seen = device or SimulatedDevice(), []
    model = nn.Sequential(*[Block(index, device, seen) for index in range(num_blocks)])
    stream = stream_blocks(model, list(model), "cpu", num_slots=num_slots, resident=resident, lane=device)
    positions = {block.index: position for position, block in enumerate(stream.blocks)}
    between = {block.index: position for block, position in stream.residents}
    expected = []
    for _ in range(3):
        with torch.set_grad_enabled(training):
            model(torch.zeros(1))
        expected += range(num_blocks)
        if training:
            for block in reversed(list(model)):
                if block.index in positions:
                    stream.use(positions[block.index], -1)
                else:
                    stream.pass_by(between[block.index], -1)
                block.compute()
            expected += reversed(range(num_blocks))
    device.run(ORDERS[order])
    return seen, [(index, [float(index)]) for index in expected]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("resident", [0, 1, 2, 4])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 5, 6, 7])
def test_every_block_computes_on_its_own_weights(num_blocks, num_slots, resident, training):
    for order in ORDERS:
        seen, expected = passes(order, num_blocks, num_slots, resident, training=training)
        assert seen == expected, order


def test_without_waiting_for_copies_a_block_sees_other_weights():
    device = SimulatedDevice()
    device.wait = lambda ticket: None
    seen, expected = passes("computation first", 5, 2, 0, device)
    assert seen != expected


def test_without_waiting_for_the_computation_a_copy_spoils_a_block():
    device = SimulatedDevice()
    device.mark = lambda: None
    seen, expected = passes("copies first", 5, 2, 0, device)
    assert seen != expected


class PackedBlock(Block):
    """A block whose weights are a matrix in bfloat16, which the 8-bit store packs."""

    def __init__(self, index, device, seen):
        super().__init__(index, device, seen)
        self.weight = nn.Parameter(torch.full((2, 64), float(index), dtype=torch.bfloat16), requires_grad=False)


@pytest.mark.parametrize("resident", [0, 1, 2])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_packed_blocks_too(num_slots, resident, monkeypatch):
    """Unpacking is computation; it is put into the simulated queue as well."""
    for order in ORDERS:
        device, seen = SimulatedDevice(), []
        model = nn.Sequential(*[PackedBlock(index, device, seen) for index in range(5)])
        options = {"num_slots": num_slots, "resident": resident, "quantise": True, "lane": device}
        stream = stream_blocks(model, list(model), "cpu", **options)
        unpack = stream.store.unpack
        monkeypatch.setattr(
            stream.store,
            "unpack",
            lambda *args, unpack=unpack, device=device: device.put("compute", lambda: unpack(*args)),
        )
        with torch.no_grad():
            for _ in range(3):
                model(torch.zeros(1))
        device.run(ORDERS[order])
        assert [index for index, _ in seen] == 3 * list(range(5)), order
        for index, values in seen:
            assert values == pytest.approx([float(index)], rel=0.01), order
