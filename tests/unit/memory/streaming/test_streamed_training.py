"""Gradients of streamed blocks are those of resident ones, and are handed on; optimisers change what is streamed."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from helpers.streaming import Chain, LateLane, Plain, gradients, run
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wandistiller.memory.lanes import ImmediateLane
from wandistiller.memory.streaming import stream_blocks


def test_a_training_pass_copies_each_block_twice_less_what_the_ring_still_holds(model, inputs):
    lane = LateLane()
    stream_blocks(model, list(model.blocks), "cpu", num_slots=2, lane=lane)
    for expected in (5 + 3, 5 + 3 + 3 + 3):
        model(*inputs, return_dict=False)[0].sum().backward()
        assert lane.count == expected


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_a_parameter_without_a_gradient_holds_nobody_up(num_blocks):
    """Of a part that this pass did not use; two places for gradients are taken in turn, and both have to come free."""

    class Spare(Plain):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(8, 8)

    model, x = Chain(num_blocks, Spare), torch.randn(3, 8)
    model(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    stream = stream_blocks(model, list(model.blocks), "cpu", train=True, lane=LateLane())

    def three():
        for _ in range(3):
            model(x).square().sum().backward()

    thread = threading.Thread(target=three, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    for name, parameter in model.blocks.named_parameters():
        found = stream.gradients.of(parameter)
        assert ("unused" in name) == (found is None)
        if found is not None:
            torch.testing.assert_close(found, 3 * expected[f"blocks.{name}"])


def test_an_exception_in_the_middle_of_backward_leaves_it_usable():
    class Fragile(torch.autograd.Function):
        is_broken = False

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Fragile.is_broken:
                raise RuntimeError("boom")
            return gradient

    class Breaking(Plain):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(self.other(Fragile.apply(self.layer(x))))

    model, x = Chain(block=Breaking), torch.randn(3, 8)
    model(x).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    stream = stream_blocks(model, list(model.blocks), "cpu", train=True, lane=LateLane())
    for _ in range(3):
        Fragile.is_broken = True
        with pytest.raises(RuntimeError, match="boom"):
            model(x).square().sum().backward()
    Fragile.is_broken = False
    stream.gradients.clear()
    thread = threading.Thread(target=lambda: model(x).square().sum().backward(), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    for name, parameter in model.blocks.named_parameters():
        torch.testing.assert_close(stream.gradients.of(parameter), expected[f"blocks.{name}"])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lane", [ImmediateLane, LateLane])
def test_a_frozen_base_with_trained_adapters(model, inputs, checkpointing, lane):
    """Adapters added before and after streaming has started, and the gradients that they get."""
    from peft import LoraConfig

    model.requires_grad_(False)
    adapter = {"r": 2, "target_modules": ["to_q", "to_out.0"], "init_lora_weights": False}
    model.add_adapter(LoraConfig(**adapter), "first")
    stream = stream_blocks(model, list(model.blocks), "cpu", lane=lane())
    model.add_adapter(LoraConfig(**adapter), "second")
    model.set_adapters(["first", "second"])
    if checkpointing:
        model.enable_gradient_checkpointing()
    found = gradients(model, inputs)
    assert len(found) == 5 * 2 * 2 * 2 * 2  # blocks, attentions, matrices, adapters, A and B
    stream.detach()
    model.disable_gradient_checkpointing()
    expected = gradients(model, inputs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trained_blocks_hand_their_gradients_on(model, inputs, checkpointing, num_slots):
    expected = gradients(model, inputs)
    model.zero_grad()
    if checkpointing:
        model.enable_gradient_checkpointing()
    stream = stream_blocks(model, list(model.blocks), "cpu", num_slots=num_slots, train=True, lane=LateLane())
    for times in (1, 2):
        model(*inputs, return_dict=False)[0].square().sum().backward()
        for name, parameter in model.named_parameters():
            found = stream.gradients.of(parameter) if name.startswith("blocks.") else parameter.grad
            torch.testing.assert_close(found, times * expected[name], msg=name)
            assert (parameter.grad is None) == name.startswith("blocks.")
    stream.gradients.clear()
    assert stream.gradients.of(model.blocks[0].attn1.to_q.weight) is None


def test_an_optimiser_on_the_host_takes_gradients_and_changes_weights(model, inputs):
    """Plain gradient descent done as gradients arrive equals the same step done afterwards."""
    twin = copy.deepcopy(model)
    stored = {}
    threads = set()

    def descend(parameter, gradient):
        threads.add(threading.get_ident())
        stored[id(parameter)].sub_(0.01 * gradient)

    stream = stream_blocks(model, list(model.blocks), "cpu", train=True, on_gradient=descend)
    for position, layout in enumerate(stream.layouts):
        for member in layout.members:
            stored[id(member.tensor)] = stream.store.views(position)[member.name]
    for _ in range(2):
        model(*inputs, return_dict=False)[0].square().sum().backward()
        stream.gradients.wait()
        stream.invalidate()
        model.zero_grad()
        for name, gradient in gradients(twin, inputs).items():
            if name.startswith("blocks."):
                with torch.no_grad():
                    twin.get_parameter(name).sub_(0.01 * gradient)
    assert threading.get_ident() not in threads
    for (name, found), expected in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_what_a_taker_raises_reaches_the_training_loop(model, inputs):
    def fail(parameter, gradient):
        raise ValueError("no room")

    stream = stream_blocks(model, list(model.blocks), "cpu", train=True, on_gradient=fail)
    model(*inputs, return_dict=False)[0].sum().backward()
    with pytest.raises(ValueError, match="no room"):
        stream.gradients.wait()


def test_gradients_flow_through_a_frozen_streamed_model(model, inputs):
    """As to a student in front of a frozen teacher, or to the latents."""
    latents = inputs[0].clone().requires_grad_()
    model.requires_grad_(False)
    model(latents, *inputs[1:], return_dict=False)[0].square().sum().backward()
    expected, latents.grad = latents.grad, None
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    model(latents, *inputs[1:], return_dict=False)[0].square().sum().backward()
    assert torch.equal(latents.grad, expected)


@pytest.mark.parametrize("train", [False, True])
def test_a_pytorch_optimiser_trains_what_is_streamed(model, inputs, train):
    """Its step happens on the host, its state is there, and what comes out is what it is without streaming."""
    twin = copy.deepcopy(model)
    stream_blocks(model, list(model.blocks), "cpu", train=train, lane=LateLane())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, twin)]
    for _ in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            each(*inputs, return_dict=False)[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    assert torch.allclose(run(model, inputs), run(twin, inputs), atol=1e-6)


def test_a_model_that_is_collected_during_an_optimisers_step_does_no_harm(model):
    """Garbage is collected at any moment, also while PyTorch walks through the hooks of all optimisers."""
    held = [stream_blocks(model, list(model.blocks), "cpu"), model]
    other = torch.nn.Parameter(torch.ones(2))
    optimiser = torch.optim.SGD([other], lr=0.5)

    def collect(*_):
        held.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    try:
        other.grad = torch.ones(2)
        optimiser.step()
    finally:
        hook.remove()
    assert other.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("quantise", [False, True])
def test_an_optimiser_may_be_given_frozen_weights_too(quantise):
    """What was kept on the device, or is stored in 8 bits, has no gradient, and the optimiser passes it over."""
    model = Chain(6).to(torch.bfloat16).requires_grad_(False)
    model.head.requires_grad_(True)
    stream = stream_blocks(model, list(model.blocks), "cpu", quantise=quantise)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    if not quantise:
        stream._keep(2)
        stream.make_places([0, 1, 3, 4, 5])
    before = model(x)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before.sum().backward()
    optimiser.step()
    assert not torch.equal(model(x), before)
    model.head.requires_grad_(False).weight.add_(model.head.weight.grad, alpha=0.1)
    model.head.bias.add_(model.head.bias.grad, alpha=0.1)
    torch.testing.assert_close(model(x), before, atol=0.05, rtol=0.05)


def test_a_trained_model_that_is_dropped_is_gone():
    model = Chain(3)
    stream = stream_blocks(model, list(model.blocks), "cpu", train=True)
    model(torch.randn(3, 8)).sum().backward()
    stream.gradients.wait()
    thread = stream.gradients._thread
    gone = weakref.ref(model.blocks[0].layer.weight)
    del model, stream
    gc.collect()
    assert gone() is None
    thread.join(timeout=10)
    assert not thread.is_alive()
