"""Blocks of every kind can be streamed: mixed dtypes, tied and shared parameters, buffers, several results."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers.streaming import Chain, LateLane, Plain
from torch import nn

from wandistiller.memory.placement import Subject, find_placement
from wandistiller.memory.streaming import stream_blocks


def test_mixed_dtypes_tied_parameters_and_buffers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8).to(torch.bfloat16)
            self.second = nn.Linear(8, 8)
            self.third = nn.Linear(8, 8)
            self.third.weight = self.second.weight
            self.register_buffer("offset", torch.randn(8))

        def forward(self, x):
            return self.third(self.second(self.first(x.to(torch.bfloat16)).float())) + self.offset

    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)])
    x = torch.randn(3, 8)
    expected = model(x)
    stream = stream_blocks(model, list(model), "cpu", lane=LateLane())
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert model[0].third.weight is model[0].second.weight
    # 8x8 in bfloat16 and once in float32, three biases and a buffer, each at a multiple of 256 bytes.
    assert stream.layouts[0].num_bytes == 6 * 256


def tie_two_blocks(model):
    model.blocks[3].layer.weight = model.blocks[0].layer.weight


def tie_block_and_head(model):
    model.head.weight = model.blocks[1].layer.weight


def tie_a_whole_module(model):
    model.head = model.blocks[2].layer


def repeat_a_block(model):
    model.blocks[4] = model.blocks[1]


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("tie", [tie_two_blocks, tie_block_and_head, tie_a_whole_module, repeat_a_block])
def test_what_blocks_share_is_there_for_each_of_them(tie, num_slots, resident):
    """Tied between blocks, or to a module outside: the slot of one of them has other bytes when the other computes."""
    model, x = Chain(), torch.randn(3, 8)
    tie(model)

    def run():
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        return [output.detach(), *(parameter.grad for parameter in model.parameters())]

    expected, state = run(), copy.deepcopy(model.state_dict())
    subject = Subject(model=model, blocks=list(model.blocks))
    predicted = find_placement("offload", num_slots=num_slots, resident=resident).predict(subject, torch.device("cpu"))
    stream = stream_blocks(model, list(model.blocks), "cpu", num_slots=num_slots, resident=resident, lane=LateLane())
    assert stream.device_bytes == predicted.device
    for _ in range(2):
        assert all(torch.equal(left, right) for left, right in zip(run(), expected, strict=True))
    stream.detach()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(left, right) for left, right in zip(run(), expected, strict=True))


def test_running_statistics_are_not_lost_with_the_slot():
    class Normed(Plain):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.norm(super().forward(x))

    model, x = Chain(block=Normed), torch.randn(16, 8)
    twin = copy.deepcopy(model)
    stream = stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    for _ in range(3):
        assert torch.equal(model(x), twin(x))
    stream.detach()
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_buffers_that_forward_changes_are_not_lost_with_the_slot(num_slots):
    class Counting(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("unchanged", torch.randn(8))

        def forward(self, x):
            self.count += 1
            return super().forward(x) + self.count * self.unchanged

    model, x = Chain(block=Counting), torch.randn(16, 8)
    twin = copy.deepcopy(model)
    stream = stream_blocks(model, list(model.blocks), "cpu", num_slots=num_slots, lane=LateLane())
    for _ in range(3):
        assert torch.equal(model(x), twin(x))
    assert stream.device_bytes == sum(slot.landing.numel() for slot in stream.slots) + 4 * (2 * (64 + 8) + 5)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    stream.detach()
    assert torch.equal(model(x), twin(x))
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())


class Nothing(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


@pytest.mark.parametrize("options", [{}, {"quantise": True}, {"resident": 9}, {"resident": 9, "quantise": True}])
def test_blocks_with_nothing_to_stream(options):
    model, x = Chain(block=Nothing), torch.randn(3, 8)
    expected = model(x)
    stream = stream_blocks(model, list(model.blocks), "cpu", lane=LateLane(), **options)
    assert torch.equal(model(x), expected)
    stream.detach()
    assert torch.equal(model(x), expected)


class Pair(nn.Module):
    """Two results, the second computed last, so that backward begins with it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pair):
        left, right = taken(pair)
        left = torch.tanh(self.first(left + right))
        return self.result(left, torch.tanh(self.second(left)))

    def result(self, left, right):
        return left, right


class Named(Pair):
    def result(self, left, right):
        return {"note": None, "pair": [left, right]}


@dataclass(slots=True)
class Result:
    pair: tuple[torch.Tensor, torch.Tensor]


class Wrapped(Pair):
    """In a class that PyTorch's trees do not know, within one that they do not know either."""

    def result(self, left, right):
        return SimpleNamespace(result=Result((left, right)))


def taken(result):
    if isinstance(result, SimpleNamespace):
        return result.result.pair
    return result["pair"] if isinstance(result, dict) else result


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("block", [Pair, Named, Wrapped])
def test_blocks_with_several_results(block, num_slots, train):
    model = nn.Sequential(*[block() for _ in range(5)])
    x = torch.randn(3, 8)

    def run(stream=None):
        model.zero_grad()
        taken(model((x, x)))[1].square().sum().backward()
        return {name: stream.gradients.of(p).clone() if stream else p.grad.clone() for name, p in model.named_parameters()}

    expected = run()
    model.zero_grad()
    stream = stream_blocks(model, list(model), "cpu", num_slots=num_slots, train=train, lane=LateLane())
    found = run(stream if train else None)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
