"""Streamed blocks compute what resident ones do, in any order of copies that the tickets allow."""

import copy

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wandistiller.memory.lanes import ImmediateLane
from wandistiller.memory.streaming import stream_blocks


class LateLane:
    """A device that does every copy as late as its tickets allow: only when the computation waits for it.

    Copies that nobody waits for are never done, and a copy done late overwrites what is there then, so a missing wait or a
    slot handed out too early gives wrong numbers.
    """

    def __init__(self):
        self.pending = {}
        self.count = 0
        self.waits = 0

    def copy(self, target, source, after):
        self.count += 1
        target.fill_(255)  # whatever was there is gone as soon as a copy may begin
        self.pending[self.count] = (target, source)
        return self.count

    def wait(self, ticket):
        self.waits += 1
        if ticket in self.pending:
            target, source = self.pending.pop(ticket)
            target.copy_(source)

    def mark(self):
        return None


@pytest.fixture
def model(tiny_size):
    torch.manual_seed(0)
    return WanTransformer3DModel(**{**tiny_size.transformer, "num_layers": 5}).eval()


@pytest.fixture
def inputs(tiny_size):
    torch.manual_seed(1)
    channels, width = tiny_size.transformer["in_channels"], tiny_size.transformer["text_dim"]
    return torch.randn(1, channels, 1, 8, 8), torch.tensor([300.0]), torch.randn(1, 4, width)


@torch.no_grad()
def run(model, inputs):
    return model(*inputs, return_dict=False)[0]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("lane", [ImmediateLane, LateLane])
def test_streamed_is_resident(model, inputs, num_slots, lane):
    expected = run(model, inputs)
    stream_blocks(model, list(model.blocks), "cpu", num_slots=num_slots, lane=lane())
    for _ in range(3):
        assert torch.equal(run(model, inputs), expected)


def test_a_missing_wait_gives_wrong_numbers(model, inputs, monkeypatch):
    """The stand-in above is strict: without waiting the result is wrong, so the tests that pass prove the waits."""
    expected = run(model, inputs)
    monkeypatch.setattr(LateLane, "wait", lambda self, ticket: None)
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    assert not torch.allclose(run(model, inputs), expected, equal_nan=True)


def test_the_device_holds_the_ring_and_no_more(model):
    stream = stream_blocks(model, list(model.blocks), "cpu", num_slots=2)
    largest = max(sum(-(-tensor.nbytes // 256) * 256 for tensor in block.parameters()) for block in model.blocks)
    outside = sum(tensor.nbytes for name, tensor in model.named_parameters() if not name.startswith("blocks."))
    outside += sum(tensor.nbytes for tensor in model.buffers())
    assert stream.device_bytes == 2 * largest + outside


def test_each_block_is_copied_once_a_pass(model, inputs):
    lane = LateLane()
    stream_blocks(model, list(model.blocks), "cpu", num_slots=2, lane=lane)
    run(model, inputs)
    assert lane.count == 6  # five blocks, and the first one again for the next pass
    run(model, inputs)
    assert lane.count == 11


def test_detaching_leaves_no_trace(model, inputs):
    before = copy.deepcopy(model.state_dict())
    expected = run(model, inputs)
    stream = stream_blocks(model, list(model.blocks), "cpu")
    run(model, inputs)
    stream.detach()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)
    assert torch.equal(run(model, inputs), expected)


def test_an_exception_in_the_middle_leaves_it_usable(model, inputs):
    expected = run(model, inputs)
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    forward = model.blocks[2].ffn.forward
    model.blocks[2].ffn.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("boom"))
    with pytest.raises(RuntimeError, match="boom"):
        run(model, inputs)
    model.blocks[2].ffn.forward = forward
    assert torch.equal(run(model, inputs), expected)


def test_the_state_is_whole_while_streaming(model, inputs):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    stream_blocks(model, list(model.blocks), "cpu")
    run(model, inputs)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


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
    assert stream.hosts[0].numel() == 6 * 256
