"""Blocks that are stored in 8 bits: half the bytes, an error that is said, and gradients that pass."""

import copy
import re

import pytest
import torch
from helpers.streaming import LateLane, run
from torch import nn

from wandistiller.errors import UsageError
from wandistiller.memory.placement import Subject, find_placement
from wandistiller.memory.streaming import stream_blocks


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_8_bit_storage_halves_the_bytes_and_says_its_error(model, inputs, num_slots):
    model.to(torch.bfloat16)
    inputs = tuple(tensor.to(torch.bfloat16) for tensor in inputs)
    expected = run(model, inputs).float()
    matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    exact = torch.cat([p.detach().float().flatten() for p in matrices])
    plain_bytes = sum(tensor.nbytes for block in model.blocks for tensor in block.parameters())
    stream = stream_blocks(model, list(model.blocks), "cpu", quantise=True, num_slots=num_slots, lane=LateLane())
    assert stream.store.host_bytes < 0.6 * plain_bytes
    for _ in range(2):
        found = run(model, inputs).float()
        assert (found - expected).norm() / expected.norm() < 0.03
    stream.detach()
    assert torch.equal(run(model, inputs).float(), found)
    rounded = torch.cat([p.detach().float().flatten() for p in matrices])
    # Measured again on what is multiplied out, which bfloat16 rounds once more.
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert stream.store.relative_error == pytest.approx(error, rel=0.15)
    # Rounding to steps of max/127 is an error of step/sqrt(12), 0.4 % of uniform weights' norm.
    assert 0.002 < stream.store.relative_error < 0.008
    assert stream.store.worst_error >= stream.store.relative_error


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.bfloat16, r"In 8 bits: rounding changes the blocks' matrices by 0\.\d\d%, the worst by 0\.\d\d%"),
        (torch.float32, "Nothing is stored in 8 bits: that is for matrices in bfloat16 or float16, and there are none"),
    ],
)
def test_the_error_is_said_to_the_user(model, dtype, said, capfd):
    subject = Subject(model=model.to(dtype).requires_grad_(False), blocks=list(model.blocks))
    find_placement("offload", quantise=True).attach(subject, torch.device("cpu"))
    assert re.search(said, capfd.readouterr().err)


def test_8_bit_storage_of_mixed_dtypes():
    """Matrices in both 16-bit formats, and numbers of 16 bits that are no weights."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.brain = nn.Linear(16, 16).half(), nn.Linear(16, 16).bfloat16()
            self.again = nn.Linear(16, 16).half()
            self.register_buffer("order", torch.arange(256, dtype=torch.int16).view(2, 128))

        def forward(self, x):
            assert self.order.flatten().tolist() == list(range(256))
            return self.again(self.brain(self.first(x.half()).bfloat16()).half()).float()

    torch.manual_seed(0)
    model = nn.Sequential(*[Mixed() for _ in range(4)]).requires_grad_(False)
    x = torch.randn(5, 16)
    expected = model(x)
    stream = stream_blocks(model, list(model), "cpu", quantise=True, lane=LateLane())
    for _ in range(2):
        assert (model(x) - expected).norm() / expected.norm() < 0.02
    stream.detach()
    assert (model(x) - expected).norm() / expected.norm() < 0.02


def test_gradients_flow_through_8_bit_storage(model, inputs):
    """To what stands in front of a frozen role, from the very weights that forward used."""
    model.to(torch.bfloat16).requires_grad_(False)
    latents = inputs[0].to(torch.bfloat16).requires_grad_()
    rest = tuple(tensor.to(torch.bfloat16) for tensor in inputs[1:])
    stream = stream_blocks(model, list(model.blocks), "cpu", quantise=True, lane=LateLane())
    model(latents, *rest, return_dict=False)[0].square().sum().backward()
    found, latents.grad = latents.grad, None
    stream.detach()
    model(latents, *rest, return_dict=False)[0].square().sum().backward()
    assert torch.equal(found, latents.grad)


def test_weights_in_8_bits_cannot_be_trained(model, inputs):
    model.to(torch.bfloat16)
    stream_blocks(model, list(model.blocks), "cpu", quantise=True)
    model(*(tensor.to(torch.bfloat16) for tensor in inputs), return_dict=False)[0].sum().backward()
    with pytest.raises(UsageError, match="cannot be trained"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_no_state_is_loaded_into_8_bits(model):
    state = copy.deepcopy(model.state_dict())
    stream_blocks(model, list(model.blocks), "cpu", quantise=True)
    with pytest.raises(UsageError, match="8 bits"):
        model.load_state_dict(state)
