"""What goes wrong around streamed weights loses none of them."""

import pytest
import torch
from helpers.streaming import LateLane
from torch import nn

from wandistiller.errors import UsageError
from wandistiller.memory import block_store, streaming
from wandistiller.memory.streaming import stream_blocks


@pytest.fixture
def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


class Late(nn.Module):
    """A layer whose own hook makes a weight of two others, as weight_norm does."""

    def __init__(self):
        super().__init__()
        self.direction, self.size = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 1))
        self.register_forward_pre_hook(Late.make)

    def make(self, args):
        self.weight = self.direction * self.size

    def forward(self, x):
        return x @ self.weight


def test_hooks_that_compute_with_weights_find_them_there():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Late() for _ in range(4))), torch.randn(2, 4)
    expected = model(x).detach()
    stream_blocks(model, list(model), "cpu", num_slots=2, lane=LateLane())
    torch.testing.assert_close(model(x).detach(), expected)


@pytest.mark.parametrize("quantise", [False, True])
def test_a_model_that_finds_no_room_keeps_its_weights(chain, monkeypatch, quantise):
    expected = {name: value.clone() for name, value in chain.state_dict().items()}
    plain, calls = block_store.allocate_host, []

    def scarce(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return plain(*args)

    monkeypatch.setattr(block_store, "allocate_host", scarce)
    with pytest.raises(MemoryError):
        stream_blocks(chain, list(chain), "cpu", quantise=quantise)
    for name, value in chain.state_dict().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("fails", ["_make_ring", "_keep_the_rest_on_device", "let_optimisers_step"])
@pytest.mark.parametrize("quantise", [False, True])
def test_a_model_that_finds_no_room_on_the_device_keeps_its_weights(chain, monkeypatch, fails, quantise):
    """Whether the ring, what stays outside of it, or anything after them finds none."""
    expected = {name: value.clone() for name, value in chain.state_dict().items()}
    plain = getattr(streaming, fails)

    def scarce(*args):
        plain(*args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(streaming, fails, scarce)
    with pytest.raises(torch.OutOfMemoryError):
        stream_blocks(chain, list(chain)[:3], "cpu", quantise=quantise)
    for name, value in chain.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    monkeypatch.undo()
    x = torch.randn(2, 4)
    alone = chain(x)
    stream_blocks(chain, list(chain)[:3], "cpu")
    torch.testing.assert_close(chain(x), alone)


def test_a_second_detach_does_nothing(chain):
    stream = stream_blocks(chain, list(chain), "cpu")
    stream.detach()
    with torch.no_grad():
        chain[0].weight.fill_(7)
    stream.detach()
    assert (chain[0].weight == 7).all()


def test_a_step_that_raises_leaves_a_model_that_computes(chain):
    x = torch.randn(2, 4)
    stream_blocks(chain, list(chain), "cpu", train=True, lane=LateLane())
    before = chain(x).detach()

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    optimizer = Fails(chain.parameters(), lr=0.1)
    chain(x).sum().backward()
    with pytest.raises(MemoryError):
        optimizer.step()
    torch.testing.assert_close(chain(x).detach(), before)


def test_a_step_that_computes_the_loss_is_refused(chain):
    stream_blocks(chain, list(chain), "cpu", train=True)
    optimizer = torch.optim.LBFGS(chain.parameters())
    with pytest.raises(UsageError, match="asks a streamed model for its loss"):
        optimizer.step(lambda: chain(torch.ones(1, 4)).sum())


def test_a_matrix_of_another_layout_is_rounded_like_any_other():
    model = nn.Sequential(nn.Linear(256, 128, bias=False, dtype=torch.bfloat16))
    model[0].weight.data = torch.randn(256, 128, dtype=torch.bfloat16).T
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    expected = model(x)
    stream_blocks(model, list(model), "cpu", quantise=True)
    torch.testing.assert_close(model(x), expected, rtol=0.1, atol=0.3)
