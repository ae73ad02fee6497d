"""Blocks of every kind can be streamed: mixed dtypes, tied and shared parameters, buffers, several results."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers.streaming import Chain, LateLane, Plain
from torch import nn

from wandistiller.errors import UsageError
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


class Skipping(Plain):
    """A block that may be left out, as some trainings do."""

    is_skipped = False

    def forward(self, x):
        return x if self.is_skipped else super().forward(x)


class InPlace(Plain):
    def forward(self, x):
        return x.mul_(super().forward(x.clone()))


@pytest.mark.parametrize("resident", [0, 1, 2, 4])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("skipped", [(2,), (2, 3), (1, 2, 3), (1, 2, 3, 4), (4, 5)])
def test_a_block_that_hands_its_input_through_is_no_bodys_turn(num_slots, skipped, resident):
    model = Chain(6, Skipping)
    for index in skipped:
        model.blocks[index].is_skipped = True
    check_gradients(model, num_slots, resident)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_an_input_that_a_block_changes_is_its_result(num_slots):
    check_gradients(Chain(5, InPlace), num_slots)


def check_gradients(model, num_slots, resident=0):
    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}

    x = torch.randn(3, 8)
    expected = gradients()
    stream_blocks(model, list(model.blocks), "cpu", num_slots=num_slots, resident=resident, lane=LateLane())
    found = gradients()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("resident", [0, 1, 2, 4])
def test_results_that_later_blocks_hand_on(resident):
    class Two(nn.Module):
        def __init__(self, is_last):
            super().__init__()
            self.image, self.text, self.is_last = nn.Linear(8, 8), nn.Linear(8, 8), is_last

        def forward(self, x, *, text):
            return torch.tanh(self.image(x) + text), text if self.is_last else torch.tanh(self.text(text) + x)

    class Pairs(Chain):
        def forward(self, x):
            x = self.embed(x)
            text = 2 * x
            for block in self.blocks:
                x, text = block(x, text=text)
            return x + text

    kinds = iter([False, False, False, True, True, True])
    check_gradients(Pairs(6, lambda: Two(next(kinds))), 2, resident)


def test_second_derivatives_are_refused():
    model = Chain(4)
    stream_blocks(model, list(model.blocks), "cpu")
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(UsageError, match="no second derivatives"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_parts_of_a_block_tell_of_its_stored_weights():
    model = Chain(6)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    stream_blocks(model, list(model.blocks), "cpu")
    for index, block in enumerate(model.blocks):
        assert torch.equal(block.layer.state_dict()["weight"], expected[f"blocks.{index}.layer.weight"])
        with pytest.raises(UsageError, match="cannot be copied"):
            copy.deepcopy(block.layer)
    x = torch.randn(3, 8)
    before = model(x)
    model.blocks[3].layer.load_state_dict({"weight": torch.zeros(8, 8), "bias": torch.zeros(8)})
    assert not torch.equal(model(x), before)
    assert not model.state_dict()["blocks.3.layer.weight"].any()


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
