"""Streamed blocks compute what resident ones do, in any order of copies that the tickets allow."""

import copy
import errno
import gc
import os
import shutil
import threading

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wandistiller.api import export
from wandistiller.errors import CheckpointError, UsageError
from wandistiller.memory.lanes import ImmediateLane
from wandistiller.memory.placement import Subject, find_placement
from wandistiller.memory.streaming import blocks_to_keep, spread_evenly, stream_blocks
from wandistiller.models.load import load_model
from wandistiller.models.stored import build_empty, inspect_checkpoint


class LateLane:
    """A device that does all work as late as its tickets allow: only when the computation waits for it.

    Work that nobody waits for is never done, and a slot's bytes are spoilt as soon as work on it may begin, so a missing wait
    or a slot handed out too early gives wrong numbers.
    """

    def __init__(self):
        self.pending = {}
        self.count = 0

    def start(self, work, after):
        self.count += 1
        names = work.__code__.co_freevars
        dict(zip(names, (cell.cell_contents for cell in work.__closure__), strict=True))["target"].view(torch.uint8).fill_(255)
        self.pending[self.count] = work
        return self.count

    def wait(self, ticket):
        if ticket in self.pending:
            self.pending.pop(ticket)()

    wait_on_host = wait

    def mark(self):
        return None

    def guard(self, tensor):
        self.guarded = [*getattr(self, "guarded", []), tensor]


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


@pytest.mark.parametrize(("resident", "copies"), [(1, (5, 9)), (0, (5, 10))])
def test_each_block_is_copied_once_a_pass(model, inputs, resident, copies):
    """Of four streamed blocks the first comes again behind the last; of five it shares the last one's slot and comes later."""
    lane = LateLane()
    stream_blocks(model, list(model.blocks), "cpu", num_slots=2, resident=resident, lane=lane)
    for expected in copies:
        run(model, inputs)
        assert lane.count == expected


def test_a_training_pass_copies_each_block_twice_less_what_the_ring_still_holds(model, inputs):
    lane = LateLane()
    stream_blocks(model, list(model.blocks), "cpu", num_slots=2, lane=lane)
    for expected in (5 + 3, 5 + 3 + 3 + 3):
        model(*inputs, return_dict=False)[0].sum().backward()
        assert lane.count == expected


def test_every_slot_is_guarded_against_a_copy_that_outlives_the_model(model):
    """Sampling ends with the next pass's first block under way; its slot must not be given to the VAE meanwhile."""
    lane = LateLane()
    stream = stream_blocks(model, list(model.blocks), "cpu", num_slots=3, lane=lane)
    assert [tensor.data_ptr() for tensor in lane.guarded] == [slot.landing.data_ptr() for slot in stream.slots]


def test_detaching_leaves_no_trace(model, inputs):
    before = copy.deepcopy(model.state_dict())
    expected = run(model, inputs)
    stream = stream_blocks(model, list(model.blocks), "cpu")
    run(model, inputs)
    stream.detach()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)
    assert not (model._state_dict_hooks or model._load_state_dict_pre_hooks)
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
    assert stream.layouts[0].num_bytes == 6 * 256


class Plain(nn.Module):
    """Something else than a Wan's block."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Chain(nn.Module):
    def __init__(self, num_blocks=5, block=Plain):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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


class Pair(nn.Module):
    """Two results, the second computed last, so that backward begins with it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pair):
        left, right = pair["pair"] if isinstance(pair, dict) else pair
        left = torch.tanh(self.first(left + right))
        return self.result(left, torch.tanh(self.second(left)))

    def result(self, left, right):
        return left, right


class Named(Pair):
    def result(self, left, right):
        return {"note": None, "pair": [left, right]}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("block", [Pair, Named])
def test_blocks_with_several_results(block, num_slots, train):
    model = nn.Sequential(*[block() for _ in range(5)])
    x = torch.randn(3, 8)

    def run(stream=None):
        model.zero_grad()
        result = model((x, x))
        (result["pair"] if isinstance(result, dict) else result)[1].square().sum().backward()
        return {name: stream.gradients.of(p).clone() if stream else p.grad.clone() for name, p in model.named_parameters()}

    expected = run()
    model.zero_grad()
    stream = stream_blocks(model, list(model), "cpu", num_slots=num_slots, train=train, lane=LateLane())
    found = run(stream if train else None)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


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


@pytest.mark.parametrize("options", [{"num_slots": 0}, {"resident": -1}])
def test_no_slot_is_refused(model, options):
    with pytest.raises(UsageError, match="not possible"):
        stream_blocks(model, list(model.blocks), "cpu", **options)


def gradients(model, inputs):
    model.zero_grad()
    model(*inputs, return_dict=False)[0].square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


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


def test_two_streamed_models_at_once(model, inputs):
    twin = copy.deepcopy(model)
    torch.nn.init.normal_(twin.proj_out.weight)
    expected = [run(model, inputs), run(twin, inputs)]
    for each in (model, twin):
        stream_blocks(each, list(each.blocks), "cpu", lane=LateLane())
    for _ in range(2):
        assert torch.equal(run(model, inputs), expected[0])
        assert torch.equal(run(twin, inputs), expected[1])


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


def test_a_model_on_the_meta_device_never_passes_through_the_device(model, inputs, tiny_folder):
    from wandistiller.models.stored import TRANSFORMER

    expected = run(model, inputs)
    state = model.state_dict()
    empty = build_empty(TRANSFORMER, dict(model.config))
    asked = []

    def read(name):
        asked.append(name)
        return state[name]

    stream = stream_blocks(empty, list(empty.blocks), "cpu", read=read, lane=LateLane())
    assert sorted(asked) == sorted(state)
    assert torch.equal(run(empty, inputs), expected)
    empty(*inputs, return_dict=False)[0].square().sum().backward()
    for (name, parameter), value in zip(empty.named_parameters(), gradients(model, inputs).values(), strict=True):
        assert torch.equal(parameter.grad, value), name
    assert all(torch.equal(value, state[name]) for name, value in empty.state_dict().items())
    stream.detach()
    assert torch.equal(run(empty, inputs), expected)


def test_loading_a_state_while_streaming(model, inputs):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    expected = run(other, inputs)
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    run(model, inputs)
    model.load_state_dict(other.state_dict())
    assert torch.equal(run(model, inputs), expected)


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


def test_compiled_blocks_stream_too(model, inputs):
    expected = run(model, inputs)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    for _ in range(2):
        assert torch.equal(run(model, inputs), expected)
    torch._dynamo.reset()


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


def test_weights_in_8_bits_cannot_be_trained(model, inputs):
    model.to(torch.bfloat16)
    stream_blocks(model, list(model.blocks), "cpu", quantise=True)
    model(*(tensor.to(torch.bfloat16) for tensor in inputs), return_dict=False)[0].sum().backward()
    with pytest.raises(UsageError, match="cannot be trained"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_streamed_model_is_not_copied_by_mistake(model):
    stream = stream_blocks(model, list(model.blocks), "cpu")
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(model)
    stream.detach()
    copy.deepcopy(model)


def from_files(stored, dtype=None, **options):
    """Return a model whose blocks come from a checkpoint's files as they are needed, and its stream."""
    model = build_empty(stored.architecture, stored.config, dtype=dtype)
    read, locate = (lambda key: stored.read_for(key, dtype)), (lambda key: stored.locate(key, dtype))
    return model, stream_blocks(model, list(model.blocks), "cpu", read=read, locate=locate, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dialect", ["diffusers", "comfyui"])
@pytest.mark.parametrize("lane", [ImmediateLane, LateLane])
def test_blocks_straight_from_the_users_files(tiny_folder, tmp_path, inputs, dtype, dialect, lane):
    """In place where the file has them as they are used, converted where not; host memory for a few blocks alone."""
    path = tiny_folder / "transformer"
    if dialect == "comfyui":
        export(model=str(path), output=tmp_path / "t.safetensors", format="comfyui", dtype="bfloat16")
        path = tmp_path / "t.safetensors"
    stored = inspect_checkpoint(path)
    inputs = tuple(tensor.to(dtype) for tensor in inputs)
    expected = run(load_model(stored, dtype=dtype), inputs)
    model, stream = from_files(stored, dtype, lane=lane())
    for _ in range(4):
        assert torch.equal(run(model, inputs), expected)
    assert stream.store.host_bytes == 4 * max(layout.num_bytes for layout in stream.layouts)
    stream.detach()
    assert torch.equal(run(model, inputs), expected)


def test_a_file_that_shrinks_while_it_is_streamed_is_named(tiny_folder, tmp_path, inputs):
    shutil.copytree(tiny_folder / "transformer", tmp_path / "t")
    stored = inspect_checkpoint(tmp_path / "t")
    model, _ = from_files(stored)
    file = tmp_path / "t" / "diffusion_pytorch_model.safetensors"
    os.truncate(file, file.stat().st_size // 3)
    with pytest.raises(CheckpointError, match="ends inside tensor"):
        run(model, inputs)


def test_a_disk_that_fails_once_is_asked_again(tiny_folder, inputs, monkeypatch):
    stored = inspect_checkpoint(tiny_folder / "transformer")
    expected = run(load_model(stored), inputs)
    model, _ = from_files(stored)
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "stale file handle")))
        with pytest.raises(OSError, match="stale"):
            run(model, inputs)
    for _ in range(2):
        assert torch.equal(run(model, inputs), expected)


def test_blocks_on_disk_are_not_trained(model):
    with pytest.raises(UsageError, match="read, not trained"):
        stream_blocks(model, list(model.blocks), "cpu", read=lambda key: None, locate=lambda key: None, train=True)


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
