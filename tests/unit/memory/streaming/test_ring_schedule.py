"""The time of a ring's passes: by closed forms, and by the engine itself on a device of which each piece of work takes as long
as it is said to."""

import pytest
import torch
from torch import nn

from wandistiller.memory.ring_schedule import Ring, ring_seconds
from wandistiller.memory.streaming import stream_blocks


class TimedDevice:
    """Tickets are times; the host takes none."""

    def __init__(self, copy_seconds):
        self.copy_seconds, self.now, self.bus = copy_seconds, 0.0, 0.0

    def start(self, work, after):
        work()
        self.bus = max(self.bus, after or 0.0) + self.copy_seconds
        return self.bus

    def wait(self, ticket):
        self.now = max(self.now, ticket)

    def mark(self):
        return self.now

    def guard(self, tensor):
        pass


class Block(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 64, dtype=torch.bfloat16), requires_grad=False)
        self.device = device

    def forward(self, x):
        self.device.now += 1.0
        return Backward.apply(x, self.device)


class Backward(torch.autograd.Function):
    """Takes twice as long as forward."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.device = device
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.now += 2.0
        return gradient, None


def of_the_engine(num_blocks, num_resident, num_slots, copy, *, trains=False, changes=False, unpack=None):
    """Return what forward and backward of the second step took, with a second for a block of forward and two of backward."""
    device = TimedDevice(copy)
    model = nn.Sequential(*[Block(device) for _ in range(num_blocks)])
    options = {"num_slots": num_slots, "resident": num_resident, "quantise": unpack is not None, "lane": device}
    stream = stream_blocks(model, list(model), "cpu", **options)
    if unpack is not None:
        stream.store.unpack = lambda *args: setattr(device, "now", device.now + unpack)
    for _ in range(2):
        start = device.now
        if changes:
            stream.invalidate()  # as an optimiser's step does
        with torch.set_grad_enabled(trains):
            y = model(torch.ones(1, requires_grad=True))
        turned = device.now
        if trains:
            y.sum().backward()
    return turned - start, device.now - turned


@pytest.mark.parametrize("copy", [0.3, 0.95, 1.1, 1.3, 1.5, 1.9, 2.6, 5.0])
@pytest.mark.parametrize(
    "shape", [(30, 0, 2), (30, 10, 2), (30, 11, 2), (7, 2, 2), (7, 3, 3), (9, 8, 2), (5, 5, 2), (6, 0, 1), (40, 5, 3)]
)
@pytest.mark.parametrize("kind", [{}, {"trains": True}, {"trains": True, "changes": True}, {"unpack": 0.4}])
def test_the_engine_takes_as_long_as_foreseen(shape, copy, kind):
    num_blocks, num_resident, num_slots = shape
    count = num_blocks - num_resident
    ring = Ring(
        num_blocks, num_resident, min(num_slots, max(count, 1)), is_packed="unpack" in kind, is_trained="changes" in kind
    )
    backward = 2.0 * num_blocks if "trains" in kind else 0.0
    foreseen = ring_seconds(ring, 1.0 * num_blocks, backward, copy * count, kind.get("unpack", 0.0) * count)
    assert of_the_engine(*shape, copy, **kind) == pytest.approx(foreseen)


@pytest.mark.parametrize(("copy", "expected"), [(0.5, 30.0), (1.0, 30.0), (2.0, 60.0)])
def test_the_slower_of_bus_and_computation_counts(copy, expected):
    assert ring_seconds(Ring(30, 0, 2), 30.0, 0.0, 30 * copy) == (expected, 0.0)


@pytest.mark.parametrize("copy", [1.1, 1.5, 2.0])
def test_copies_go_on_while_a_block_computes_that_stays(copy):
    """A third stays: the bus has three blocks' time for two, and needs all of it where they take half as long again."""
    assert ring_seconds(Ring(30, 10, 2), 30.0, 0.0, 20 * copy)[0] == pytest.approx(max(30.0, 20 * copy))
    assert of_the_engine(30, 10, 2, copy)[0] == pytest.approx(max(30.0, 20 * copy))


def test_where_backward_begins_blocks_are_there_already():
    """The last two of forward are the first two of backward, and the other way round: each goes over the bus once for both."""
    forward, backward = ring_seconds(Ring(10, 0, 2), 10.0, 10.0, 10 * 5.0)
    assert forward + backward == pytest.approx((10 + 10 - 2 * 2) * 5.0, rel=0.05)


def test_a_slot_of_packed_blocks_is_free_once_they_are_unpacked():
    """So the next one comes while this one computes, also with a single slot."""
    assert ring_seconds(Ring(10, 0, 1), 10.0, 0.0, 10.0)[0] == pytest.approx(20.0)
    assert ring_seconds(Ring(10, 0, 1, is_packed=True), 10.0, 0.0, 10.0)[0] == pytest.approx(10.0)
    assert ring_seconds(Ring(10, 0, 2, is_packed=True), 10.0, 0.0, 10.0, 1.0)[0] == pytest.approx(11.0)
