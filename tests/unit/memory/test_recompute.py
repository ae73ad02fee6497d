"""Recomputed is what ran, in every respect; what it cannot give the gradients of is refused, not passed over."""

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

from wandistiller.errors import UsageError
from wandistiller.memory import attention
from wandistiller.memory.activations import apply_policy

CPU = torch.device("cpu")
RECOMPUTED = ("full", "selective")


class Adds(nn.Module):
    """Adds what somebody else owns."""

    def __init__(self, others):
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.others = [others]  # in a list, where PyTorch does not find it

    def forward(self, x):
        return self.own(x) + self.others[0](x)


@pytest.mark.parametrize("policy", RECOMPUTED)
def test_a_layer_that_a_block_does_not_own_is_refused(policy):
    block = Adds(nn.Linear(4, 4))
    active = apply_policy([block], policy, CPU)
    with pytest.raises(UsageError, match=r"uses a trained tensor \(4,? ?4?,?\) that it is not given"):
        block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    active.detach()
    block.others[0].requires_grad_(False)
    apply_policy([block], policy, CPU)
    block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert block.own.weight.grad is not None


@pytest.mark.parametrize("policy", RECOMPUTED)
def test_conditioning_that_comes_past_the_arguments_is_refused(policy):
    embed, block = nn.Linear(4, 4), Adds(nn.Identity())
    apply_policy([block], policy, CPU)
    condition = embed(torch.ones(2, 4))
    block.others[0] = lambda x: condition
    with pytest.raises(UsageError, match="would get no gradient"):
        block(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("policy", RECOMPUTED)
def test_second_derivatives_are_refused(policy):
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    apply_policy([block], policy, CPU)
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(UsageError, match="Second derivatives"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)


class Attends(nn.Module):
    """Attention over channels that come first, as convolutions have them; ``inner`` recomputes it by PyTorch's own means."""

    def __init__(self, inner=False):
        super().__init__()
        self.make, self.inner = nn.Conv1d(16, 48, 1), inner

    def attend(self, x):
        query, key, value = self.make(x).view(len(x), 3, 2, 8, -1).unbind(1)
        strided = [each.transpose(2, 3) for each in (query, key, value)]
        tensors = [each.contiguous() for each in strided] if self.inner else strided
        return functional.scaled_dot_product_attention(*tensors).transpose(2, 3).flatten(1, 2) + x

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False) if self.inner else self.attend(x)


@pytest.mark.parametrize("inner", [False, True], ids=["strided", "with a checkpoint of its own"])
@pytest.mark.parametrize("policy", RECOMPUTED)
def test_attention_of_every_kind_is_as_without_a_policy(policy, inner):
    torch.manual_seed(0)
    block, x = Attends(inner), torch.randn(1, 16, 1100, requires_grad=True)
    out = block(x)
    expected = out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
    active = apply_policy([block], policy, CPU)
    out = block(x)
    found = out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
    active.detach()
    for each, same in zip(found, expected, strict=True):
        torch.testing.assert_close(each, same, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", RECOMPUTED)
def test_backward_under_an_autocast_that_forward_was_not_under(policy):
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(4, 16)

    def gradients():
        loss = block(x).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(loss, list(block.parameters()))

    expected = gradients()
    apply_policy([block], policy, CPU)
    assert all(map(torch.equal, gradients(), expected))


def test_a_second_detach_leaves_the_attention_of_others_alone():
    before = attention._installed
    one, other = (apply_policy([nn.Linear(4, 4)], "selective", CPU) for _ in range(2))
    one.detach()
    one.detach()
    assert attention._installed == before + 1 and functional.scaled_dot_product_attention is attention._attention
    other.detach()
    assert attention._installed == before


def test_a_block_that_stands_twice_is_recomputed_twice():
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    block(block(x)).sum().backward()
    expected, block[0].weight.grad = block[0].weight.grad, None
    active = apply_policy([block, block], "full", CPU)
    block(block(x)).sum().backward()
    torch.testing.assert_close(block[0].weight.grad, expected)
    active.detach()
    assert "forward" not in block.__dict__


def test_blocks_that_are_refused_are_left_as_they_were():
    free, taken = nn.Linear(4, 4), nn.Linear(4, 4)
    apply_policy([taken], "full", CPU)
    with pytest.raises(UsageError, match="have an activation policy already"):
        apply_policy([free, taken], "full", CPU)
    assert "forward" not in free.__dict__


def test_a_block_that_compiles_itself_is_refused():
    block = nn.Linear(4, 4)
    block.compile(backend="eager")
    with pytest.raises(UsageError, match=r"block\.forward = torch\.compile\(block\.forward\)"):
        apply_policy([block], "full", CPU)
