"""Blocks that stay on the device: which, how many, and what they save."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.streaming import LateLane, run

from wandistiller.errors import UsageError
from wandistiller.memory.lanes import ImmediateLane
from wandistiller.memory.residents import blocks_to_keep, spread_evenly
from wandistiller.memory.streaming import stream_blocks


@pytest.mark.parametrize("resident", [0, 1, 3, 4, 5, 9])
def test_resident_blocks(model, inputs, resident):
    expected = run(model, inputs)
    lane = LateLane()
    stream = stream_blocks(model, list(model.blocks), "cpu", resident=resident, lane=lane)
    for _ in range(2):
        assert torch.equal(run(model, inputs), expected)
    assert len(stream.blocks) == max(5 - resident, 0)
    stream.detach()
    assert torch.equal(run(model, inputs), expected)


def test_backward_after_the_end_of_a_stream_is_refused(model, inputs):
    """Resident blocks come first there, and have nothing to bring any more."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    stream = stream_blocks(model, list(model.blocks), "cpu", resident=4, lane=LateLane())
    found = model(*inputs, return_dict=False)[0].square().sum()
    stream.detach()
    with pytest.raises(UsageError, match="moved or converted"):
        found.backward()


@pytest.mark.parametrize(
    ("total", "chosen", "expected"), [(10, 2, {2, 7}), (5, 5, {0, 1, 2, 3, 4}), (40, 0, set()), (3, 1, {1})]
)
def test_residents_are_spread_evenly(total, chosen, expected):
    assert spread_evenly(total, chosen) == expected


@pytest.mark.parametrize(
    ("copy_seconds", "compute_seconds", "room", "expected"),
    [
        (6.0, 2.2, 10**9, 19),  # 11 of 30 blocks can be copied while 30 compute: 19 stay
        (1.0, 2.0, 10**9, 0),  # the bus keeps up by itself
        (6.0, 2.2, 5 * 100, 5),  # no room for more
        (0.0, 1.0, 10**9, 0),
    ],
)
def test_as_many_residents_as_the_bus_needs(copy_seconds, compute_seconds, room, expected):
    assert blocks_to_keep(30, copy_seconds, compute_seconds, room, 100) == expected


class ClockLane(ImmediateLane):
    """Copies and computation take as long as they are said to."""

    def __init__(self, copy_seconds):
        self.now, self.copy_seconds = 0.0, copy_seconds

    def start(self, work, after):
        self.now += self.copy_seconds
        return super().start(work, after)

    def clock(self):
        return self.now


@pytest.mark.parametrize(
    ("copy_seconds", "room", "expected"), [(0.5, 100, 0), (1.0, 100, 0), (2.0, 100, 4), (4.0, 100, 6), (2.0, 3, 3), (2.0, 0, 0)]
)
def test_blocks_stay_until_the_bus_keeps_up(tiny_size, inputs, copy_seconds, room, expected):
    """Eight blocks that compute for a second each: with copies twice as long, every second one has to stay."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(**{**tiny_size.transformer, "num_layers": 8}).requires_grad_(False)
    plain, lane = run(model, inputs), ClockLane(copy_seconds)
    stream = stream_blocks(model, list(model.blocks), "cpu", lane=lane)
    stream.is_timed = True
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: setattr(lane, "now", lane.now + 1.0))
    assert torch.equal(run(model, inputs), plain)
    before, size = stream.device_bytes, stream.layouts[0].num_bytes
    assert stream.keep_up(room * size) == expected
    assert stream.device_bytes - before == expected * size
    assert sum(flat.numel() for flat in stream.store.flats) == (8 - expected) * size
    copied = lane.now
    for _ in range(2):
        assert torch.equal(run(model, inputs), plain)
    assert lane.now - copied <= 2 * (8 + (8 - expected) * copy_seconds) + 2 * copy_seconds
    assert stream.keep_up(room * size) == 0, "without another timed pass"
    state = {name: value.clone() for name, value in model.state_dict().items()}
    stream.detach()
    assert torch.equal(run(model, inputs), plain)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
