"""Whatever is recomputed or sent away, gradients are the same and the peak is lower."""

import copy
import functools
import shutil
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as functional
from diffusers import WanTransformer3DModel
from helpers.live_bytes import LiveBytes
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.errors import UsageError
from wandistiller.memory import attention
from wandistiller.memory.activations import GRANULARITIES, POLICIES, apply_policy, prepare_blocks
from wandistiller.memory.kept import DeviceKeeper, HostKeeper
from wandistiller.memory.streaming import stream_blocks


@pytest.fixture
def model(tiny_size):
    torch.manual_seed(0)
    return WanTransformer3DModel(**{**tiny_size.transformer, "num_layers": 4})


@pytest.fixture
def inputs(tiny_size):
    torch.manual_seed(1)
    channels, width = tiny_size.transformer["in_channels"], tiny_size.transformer["text_dim"]
    return torch.randn(2, channels, 2, 16, 16), torch.tensor([300.0, 700.0]), torch.randn(2, 8, width)


@pytest.fixture(autouse=True)
def short_attention(monkeypatch):
    monkeypatch.setattr(attention, "MIN_KEYS", 64)  # self-attention here has 128 keys, attention to text 8


def gradients(model, inputs):
    """Return gradients, output and the peak of live bytes; gradients are allocated beforehand."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    latents = inputs[0].clone().requires_grad_()
    with LiveBytes() as live:
        output = model(latents, *inputs[1:], return_dict=False)[0]
        output.square().mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**found, "latents": latents.grad, "output": output.detach()}, live.peak


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_the_same(model, inputs, policy, to_host, granularity):
    expected, plain_peak = gradients(model, inputs)
    keeper = HostKeeper(torch.device("cpu"), min_bytes=1024) if to_host else None
    active = apply_policy(list(model.blocks), policy, "cpu", granularity=granularity, keeper=keeper)
    for _ in range(2):
        found, peak = gradients(model, inputs)
        check(found, expected)
    if policy != "none" and not to_host:
        assert peak < plain_peak
    active.detach()
    assert not any("forward" in module.__dict__ for module in model.modules())
    again, _ = gradients(model, inputs)
    assert all(torch.equal(again[name], value) for name, value in expected.items())


def test_what_each_policy_keeps(model, inputs, monkeypatch):
    """Everything, then inputs and attention, then inputs alone."""
    put = DeviceKeeper.put
    monkeypatch.setattr(DeviceKeeper, "put", lambda self, tensor: LiveBytes.latest.count(tensor) or put(self, tensor))
    peaks = {}
    for policy in POLICIES:
        active = apply_policy(list(model.blocks), policy, "cpu")
        peaks[policy] = gradients(model, inputs)[1]
        active.detach()
    assert peaks["full"] < peaks["selective"] < 0.6 * peaks["none"]
    # Selective keeps one more tensor a block, the size of the hidden states, and the sums of the softmax.
    hidden = 2 * 128 * 96 * 4 + 2 * 4 * 128 * 4
    assert peaks["selective"] - peaks["full"] == pytest.approx(4 * hidden, rel=0.3)


def test_attention_is_computed_once_under_the_selective_policy(model, inputs, monkeypatch):
    calls = []
    forward = attention._forward
    monkeypatch.setattr(attention, "_forward", lambda *args: calls.append(1) or forward(*args))
    active = apply_policy(list(model.blocks), "selective", "cpu")
    gradients(model, inputs)
    assert len(calls) == 4  # one self-attention a block
    active.detach()
    assert torch.nn.functional.scaled_dot_product_attention is attention._plain_attention


def test_compiled_blocks_stay_compiled_however_many_shapes_data_have(monkeypatch):
    """PyTorch's own limit is eight; each number of dimensions is a graph of its own."""
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    block = nn.Tanh()
    torch._dynamo.reset()
    with ExitStack() as ends:
        prepare_blocks([block], torch.device("cpu"), ends, compiled=True, policy="none", to_host=False)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for dimensions in range(1, 13):
            block(torch.ones([2] * dimensions))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 12


def test_nothing_changes_without_gradients(model, inputs):
    with torch.no_grad():
        expected = model(*inputs)[0]
        apply_policy(list(model.blocks), "full", "cpu")
        assert torch.equal(model(*inputs)[0], expected)


def test_kept_attention_is_pytorchs(monkeypatch):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 16, requires_grad=True) for length in (70, 80, 80))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3)
    expected_gradients = torch.autograd.grad(expected.square().sum(), (query, key, value))
    attention.install()
    with attention.ledger_in_use(attention.Ledger()):
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3)
    attention.uninstall()
    torch.testing.assert_close(found, expected)
    for left, right in zip(torch.autograd.grad(found.square().sum(), (query, key, value)), expected_gradients, strict=True):
        torch.testing.assert_close(left, right)


def test_the_operator_is_well_formed():
    query, key, value = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    torch.library.opcheck(attention._attention_op, (query, key, value, 0.35), test_utils=("test_schema", "test_faketensor"))


def test_frozen_blocks_with_adapters(model, inputs):
    from peft import LoraConfig

    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    latents = inputs[0]

    def adapters():
        model.zero_grad()
        model(latents, *inputs[1:], return_dict=False)[0].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = adapters()
    apply_policy(list(model.blocks), "selective", "cpu")
    check(adapters(), expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("to_host", [False, True])
def test_streamed_and_trained(model, inputs, policy, to_host):
    expected, _ = gradients(model, inputs)
    model.zero_grad()
    keeper = HostKeeper(torch.device("cpu"), min_bytes=1024) if to_host else None
    apply_policy(list(model.blocks), policy, "cpu", keeper=keeper)
    stream = stream_blocks(model, list(model.blocks), "cpu", train=True)
    model(*inputs, return_dict=False)[0].square().mean().backward()
    for name, parameter in model.named_parameters():
        found = stream.gradients.of(parameter) if name.startswith("blocks.") else parameter.grad
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_compiled_blocks(model, inputs, policy, granularity):
    expected, _ = gradients(model, inputs)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    compiled = model.blocks[0].forward
    active = apply_policy(list(model.blocks), policy, "cpu", granularity=granularity)
    check(gradients(model, inputs)[0], expected)
    active.detach()
    assert model.blocks[0].forward is compiled
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs a C++ compiler")
def test_compiled_code_does_not_write_over_what_is_kept():
    """Inductor reuses the memory of a result after its last use; what is kept of it must be out of its reach."""
    torch.manual_seed(0)
    weights = [torch.randn(64, 64) * 0.2 for _ in range(6)]
    hidden = torch.randn(2, 64, 64)

    def block(hidden):
        query, key, value = ((hidden @ weight).view(2, 64, 2, 32).transpose(1, 2) for weight in weights[:3])
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + attended @ weights[3]
        return hidden + torch.tanh(torch.tanh(hidden @ weights[4]) @ weights[5])

    def kept(run):
        ledger = attention.Ledger()
        with torch.no_grad(), attention.ledger_in_use(ledger):
            run(hidden)
        return ledger.results[0]

    attention.install()
    try:
        for found, expected in zip(kept(torch.compile(block)), kept(block), strict=True):
            torch.testing.assert_close(found, expected)
    finally:
        attention.uninstall()
        torch._dynamo.reset()


def test_dropout_draws_the_same_numbers_again():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.layer(x)).relu()

    torch.manual_seed(0)
    block = Block()
    twin = copy.deepcopy(block)
    apply_policy([block], "full", "cpu")
    x = torch.randn(8, 16)
    results = []
    for each in (block, twin):
        torch.manual_seed(5)
        each(x).sum().backward()
        results.append((each.layer.weight.grad, torch.rand(1)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])  # and the state afterwards is as without recomputation


@pytest.mark.parametrize("drop", [functional.dropout, functional.dropout1d, functional.alpha_dropout])
def test_random_numbers_that_no_module_tells_of_are_the_same_again(drop):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            return drop(self.layer(x), 0.5, True).relu()

    torch.manual_seed(0)
    block = Block()
    twin = copy.deepcopy(block)
    apply_policy([block], "full", "cpu")
    results = []
    for each in (block, twin):
        torch.manual_seed(5)
        each(torch.randn(8, 16)).sum().backward()
        results.append(each.layer.weight.grad)
    assert torch.equal(*results)


class Several(nn.Module):
    """More than a tensor comes out."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(16, 16), make

    def forward(self, x):
        return self.make(torch.tanh(self.layer(x)), x)


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda new, old: (new, None), lambda result: result[0]),
        (lambda new, old: ("kept", old, new), lambda result: result[1] + result[2]),
        (lambda new, old: {"hidden": new, "inner": [new * 2, 3]}, lambda result: result["hidden"] + result["inner"][0]),
        (lambda new, old: [new], lambda result: result[0]),
    ],
    ids=["none", "an input", "a table", "a list"],
)
def test_whatever_a_block_returns(make, take, policy, to_host):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Several(make) for _ in range(3))
    x = torch.randn(4, 16, requires_grad=True)

    def run():
        hidden = x
        for block in blocks:
            result = block(hidden)
            hidden = take(result)
        hidden.square().sum().backward()
        found = [x.grad.clone(), *(parameter.grad.clone() for parameter in blocks.parameters())]
        x.grad = None
        blocks.zero_grad()
        return type(result), found

    kind, expected = run()
    keeper = HostKeeper(torch.device("cpu"), min_bytes=1) if to_host else None
    apply_policy(list(blocks), policy, "cpu", keeper=keeper)
    found_kind, found = run()
    assert found_kind is kind
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


@dataclass
class Result:
    hidden: torch.Tensor


class Boxed(nn.Module):
    def __init__(self, takes, returns):
        super().__init__()
        self.layer, self.takes, self.returns = nn.Linear(16, 16), takes, returns

    def forward(self, x):
        result = torch.tanh(self.layer(x.hidden if self.takes else x))
        return Result(result) if self.returns else result


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("takes", [False, True])
def test_a_class_whose_tensors_would_have_no_gradients_is_named(policy, takes):
    block, x = Boxed(takes, not takes), torch.randn(4, 16, requires_grad=True)
    apply_policy([block], policy, "cpu")
    with pytest.raises(UsageError, match="a Result with tensors"):
        block(Result(x) if takes else x)


def test_parameters_of_results_that_nobody_uses_have_no_gradient():
    block = Several(lambda new, old: (old * 2, new))
    apply_policy([block], "full", "cpu")
    block(torch.randn(4, 16, requires_grad=True))[0].sum().backward()
    assert block.layer.weight.grad is None


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        x += torch.tanh(self.layer(x.clone()))
        return x


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_what_is_changed_in_place_is_not_recomputed(policy):
    """Recomputed from what it was changed to, gradients would be wrong."""
    block = InPlace()
    apply_policy([block], policy, "cpu")
    with pytest.raises(UsageError, match="changed in place"):
        block(torch.randn(4, 16))
    plain, x = nn.Linear(16, 16), torch.randn(4, 16)
    apply_policy([plain], policy, "cpu")
    output = plain(x)
    x.zero_()
    with pytest.raises(UsageError, match="changed in place"):
        output.sum().backward()


@pytest.mark.parametrize("granularity", ["attention", "feed_forward"])
def test_parts_of_a_text_encoder_are_recomputed_once(granularity):
    """Its attention and its feed-forward have others within them."""
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4))
    name = {"attention": "UMT5Attention", "feed_forward": "UMT5DenseGatedActDense"}[granularity]
    part = next(module for module in encoder.modules() if type(module).__name__ == name)
    calls = []
    next(part.children()).register_forward_pre_hook(lambda *_: calls.append(1))
    apply_policy(list(encoder.encoder.block), "full", "cpu", granularity=granularity)
    encoder(torch.arange(8)[None]).last_hidden_state.sum().backward()
    assert len(calls) == 2


def test_going_backward_twice_is_told():
    block = nn.Linear(4, 4)
    apply_policy([block], "full", "cpu")
    loss = block(torch.randn(2, 4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="twice"):
        loss.backward()


def test_autocast_is_recomputed_as_it_was(model, inputs):
    def run():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*inputs, return_dict=False)[0].square().mean()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = run()
    apply_policy(list(model.blocks), "full", "cpu")
    found = run()
    for name, value in expected.items():
        if name.startswith("blocks."):
            assert torch.equal(found[name], value), name
        else:  # what all blocks share sums its gradients block by block, in another order
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=1e-4, msg=name)


def test_host_memory_is_used_again_in_every_step(model, inputs):
    keeper = HostKeeper(torch.device("cpu"), min_bytes=1024)
    apply_policy(list(model.blocks), "selective", "cpu", keeper=keeper)
    sizes = []
    for _ in range(4):
        gradients(model, inputs)
        sizes.append(keeper.host_bytes)
    assert sizes[0] > 0
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_host_memory_of_a_forward_without_a_backward_is_used_again(model, inputs, policy):
    """An exception in the middle, or a loss that is only looked at."""
    expected, _ = gradients(model, inputs)
    keeper = HostKeeper(torch.device("cpu"), min_bytes=1024)
    apply_policy(list(model.blocks), policy, "cpu", keeper=keeper)
    sizes = []
    for number in range(4):
        if number % 2:
            model.blocks[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("stop")))
            with pytest.raises(KeyError):
                model(*inputs)
            model.blocks[2]._forward_pre_hooks.clear()
        else:
            model(*inputs, return_dict=False)
        check(gradients(model, inputs)[0], expected)
        sizes.append(keeper.host_bytes)
    assert len(set(sizes)) == 1
    assert not keeper._stack


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "ful"}, "did you mean 'full'"),
        ({"name": "full", "granularity": "blok"}, "did you mean 'block'"),
    ],
)
def test_unknown_names(model, arguments, message):
    with pytest.raises(UsageError, match=message):
        apply_policy(list(model.blocks), device="cpu", **arguments)


def test_one_policy_at_a_time(model):
    apply_policy(list(model.blocks), "full", "cpu")
    with pytest.raises(UsageError, match="already"):
        apply_policy(list(model.blocks), "full", "cpu")


def test_a_model_with_a_policy_is_not_copied_by_mistake(model):
    active = apply_policy(list(model.blocks), "full", "cpu")
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(model)
    active.detach()
    copy.deepcopy(model)


class Conjugate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        z = torch.complex(self.layer(x), 2 * x)
        return x + torch.view_as_real(z * z.conj() * z).sum(-1)


def test_a_number_and_its_conjugate_are_two():
    """They share memory, and only a flag tells them apart."""
    block, x = Conjugate(), torch.randn(3, 8)
    block(x).sum().backward()
    expected = block.layer.weight.grad.clone()
    block.zero_grad()
    apply_policy([block], "none", "cpu", keeper=HostKeeper(torch.device("cpu"), min_bytes=0))
    y = block(x).sum()
    y.backward(retain_graph=True)
    torch.testing.assert_close(block.layer.weight.grad, expected)
    with pytest.raises(UsageError, match="twice"):
        y.backward()


class Unlike(nn.Module):
    """Attention of long sequences that only PyTorch's own function takes: other widths, one key for all, mixed dtypes."""

    def __init__(self, width=8, shares=False, is_normed=False):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, width)
        self.shares, self.is_normed = shares, is_normed

    def forward(self, x):
        query, key, value = (layer(x)[:, None] for layer in (self.query, self.key, self.value))
        if self.is_normed:
            query, key = nn.functional.normalize(query.float(), dim=-1), nn.functional.normalize(key.float(), dim=-1)
        if self.shares:
            key, value = key[:1], value[:1]
        return nn.functional.scaled_dot_product_attention(query, key, value)[:, 0]


@pytest.mark.parametrize(("options", "casts"), [({"width": 16}, False), ({"shares": True}, False), ({"is_normed": True}, True)])
def test_attention_of_any_kind_under_the_selective_policy(options, casts, monkeypatch):
    monkeypatch.setattr(attention, "MIN_KEYS", 16)
    block, x = Unlike(**options), torch.randn(2, 32, 8)

    def gradients():
        block.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            y = block(x)
        y.float().square().sum().backward()
        return [parameter.grad.clone() for parameter in block.parameters()]

    expected = gradients()
    policy = apply_policy([block], "selective", "cpu")
    found = gradients()
    policy.detach()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if casts else 1e-5, atol=1e-2 if casts else 1e-6)
