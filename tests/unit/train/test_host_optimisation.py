"""Updates on the host, beside forward or backward, against the ordinary optimiser on the same numbers."""

import copy

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wandistiller.errors import UsageError
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.stage import Placing
from wandistiller.memory.streaming import stream_blocks
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Training
from wandistiller.train.ema import MovingAverage
from wandistiller.train.host_optimisation import HostOptimisation
from wandistiller.train.optimisation import Optimisation, OptimiserOptions

CPU = torch.device("cpu")
OPTIONS = {"rate": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 1, "num_steps": 6}


@pytest.fixture
def batches(tiny_size):
    torch.manual_seed(1)
    channels, width = tiny_size.transformer["in_channels"], tiny_size.transformer["text_dim"]
    return [
        (torch.randn(1, channels, 1, 8, 8), torch.tensor([300.0]), torch.randn(1, 8, width), torch.randn(1, channels, 1, 8, 8))
        for _ in range(12)
    ]


def make(tiny_size, streamed, dtype=torch.float32, policy=None, **options):
    torch.manual_seed(0)
    model = WanTransformer3DModel(**{**tiny_size.transformer, "num_layers": 4}).to(dtype)
    stream = None
    if policy:
        apply_policy(list(model.blocks), policy, CPU)
    if streamed:
        stream = stream_blocks(model, list(model.blocks), CPU, train=True)
    parameters = dict(model.named_parameters())
    options = OptimiserOptions(**{**OPTIONS, **options})
    return model, HostOptimisation(parameters, stream, options, "no", CPU) if streamed else Optimisation(
        parameters, options, "no", CPU
    )


def train(model, optimisation, batches, start=0, steps=6, accumulation=2):
    norms = []
    for step in range(start, steps):
        for turn in range(accumulation):
            noisy, times, text, target = batches[step * accumulation + turn]
            dtype = next(model.parameters()).dtype
            found = model(noisy.to(dtype), times, text.to(dtype), return_dict=False)[0]
            loss = (found.float() - target).square().mean() / accumulation
            optimisation.backward(loss, is_last=turn == accumulation - 1)
        norms.append(optimisation.step(step).item())
    return norms


@pytest.mark.parametrize("clip_norm", [None, 0.05, 100.0])
@pytest.mark.parametrize(("policy", "accumulation", "piece"), [(None, 1, 100), (None, 2, 100), ("full", 1, None)])
def test_it_is_the_ordinary_optimiser(tiny_size, batches, clip_norm, policy, accumulation, piece, monkeypatch):
    if piece is not None:  # most members are several pieces then, and some pieces several members
        monkeypatch.setattr("wandistiller.memory.host_threads.PIECE", piece)
        monkeypatch.setattr("wandistiller.train.host_optimisation.PIECE", piece)
    plain, ordinary = make(tiny_size, False, clip_norm=clip_norm)
    expected = train(plain, ordinary, batches, accumulation=accumulation)
    streamed, on_host = make(tiny_size, True, clip_norm=clip_norm, policy=policy)
    assert train(streamed, on_host, batches, accumulation=accumulation) == pytest.approx(expected, rel=1e-4)
    assert on_host.rate == pytest.approx(ordinary.rate)
    found = streamed.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_goes_on_to_the_bit(tiny_size, batches, clip_norm, accumulation):
    straight, optimisation = make(tiny_size, True, clip_norm=clip_norm, dtype=torch.bfloat16)
    train(straight, optimisation, batches, accumulation=accumulation)
    expected = {name: value.clone() for name, value in straight.state_dict().items()}
    first, optimisation = make(tiny_size, True, clip_norm=clip_norm, dtype=torch.bfloat16)
    train(first, optimisation, batches, steps=3, accumulation=accumulation)
    tensors, facts = optimisation.state()
    saved = {name: value.clone() for name, value in first.state_dict().items()}
    second, optimisation = make(tiny_size, True, clip_norm=clip_norm, dtype=torch.bfloat16)
    second.load_state_dict(saved)
    optimisation.load_state({name: value.clone() for name, value in tensors.items()}, facts)
    train(second, optimisation, batches, start=3, accumulation=accumulation)
    for name, value in second.state_dict().items():
        assert torch.equal(value, expected[name]), name


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values):
        return values + self.used(values).tanh()


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_weights_without_a_gradient_stay_and_a_step_that_broke_off_is_forgotten(clip_norm):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block(), nn.Linear(4, 4))
    streamed = copy.deepcopy(plain)
    stream = stream_blocks(streamed, list(streamed[:2]), CPU, train=True)
    options = OptimiserOptions(rate=1e-2, weight_decay=0.1, clip_norm=clip_norm)
    on_host = HostOptimisation(dict(streamed.named_parameters()), stream, options, "no", CPU)
    ordinary, values = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1), torch.randn(3, 4)
    for step in range(4):
        if step == 2 and clip_norm:  # without, the blocks before the break have had their step
            broken = streamed[2](streamed[1](Break.apply(streamed[0](values))))
            with pytest.raises(RuntimeError, match="broke off"):
                on_host.backward(broken.square().mean())
        plain(values).square().mean().backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        ordinary.step()
        ordinary.zero_grad()
        on_host.backward(streamed(values).square().mean())
        on_host.step(step)
    for name, value in streamed.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("it broke off")


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_follows_as_it_would_by_itself(tiny_size, batches, clip_norm, dtype, monkeypatch):
    """One that is left to the optimiser's threads, in small pieces, and one that looks at the weights after each step."""
    monkeypatch.setattr("wandistiller.memory.host_threads.PIECE", 100)
    monkeypatch.setattr("wandistiller.train.host_optimisation.PIECE", 100)
    model, optimisation = make(tiny_size, True, clip_norm=clip_norm, dtype=dtype)
    names = list(optimisation.parameters)
    followed, alone = (MovingAverage(model, names, 0.7) for _ in range(2))
    optimisation.follow(followed)
    for step in range(5):
        train(model, optimisation, batches, start=step, steps=step + 1, accumulation=1)
        for average in (followed, alone):
            average.update(step + 1)
    found = followed.tensors()
    assert found.keys() == alone.averages.keys()
    for name, value in alone.averages.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with followed.in_use():
        state = model.state_dict()
        assert all(torch.equal(state[name], value.to(dtype)) for name, value in found.items())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_step_that_broke_off_has_taken_in_nothing_for_the_next():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 4))
    for block in model[:2]:
        block.unused = nn.Identity()  # so that a block's gradients are complete in backward
    stream = stream_blocks(model, list(model[:2]), CPU, train=True)
    on_host = HostOptimisation(dict(model.named_parameters()), stream, OptimiserOptions(clip_norm=None), "no", CPU)
    followed = MovingAverage(model, list(on_host.parameters), 0.7)
    on_host.follow(followed)
    with pytest.raises(RuntimeError, match="broke off"):
        on_host.backward(model[2](model[1](Break.apply(model[0](torch.randn(3, 4))))).square().mean())
    before = followed.tensors()["1.used.weight"].clone()
    on_host.backward(model[2](model[0](torch.randn(3, 4))).square().mean())
    on_host.step(0)
    expected = before.lerp(model.state_dict()["1.used.weight"], followed.weight(1))
    torch.testing.assert_close(followed.tensors()["1.used.weight"], expected)


def test_blocks_that_had_no_gradient_in_some_steps_go_on_to_the_bit():
    def run(steps, start=0, saved=None):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.Linear(4, 4))
        stream = stream_blocks(model, list(model[:2]), CPU, train=True)
        on_host = HostOptimisation(dict(model.named_parameters()), stream, OptimiserOptions(rate=1e-2), "no", CPU)
        if saved is not None:
            model.load_state_dict(saved[0])
            on_host.load_state(*saved[1])
        for step in range(start, steps):
            torch.manual_seed(100 + step)
            hidden = model[0](torch.randn(3, 4)) if step % 2 else torch.randn(3, 4)
            on_host.backward(model[2](model[1](hidden)).square().mean())
            on_host.step(step)
        tensors, facts = on_host.state()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return state, ({name: value.clone() for name, value in tensors.items()}, facts)

    straight, again = run(6)[0], run(6, 3, run(3))[0]
    assert all(torch.equal(value, again[name]) for name, value in straight.items())


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_an_average_of_weights_without_a_gradient_follows_too(clip_norm):
    """Parts of a block, and in some steps whole blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 4))
    stream = stream_blocks(model, list(model[:2]), CPU, train=True)
    on_host = HostOptimisation(dict(model.named_parameters()), stream, OptimiserOptions(clip_norm=clip_norm), "no", CPU)
    followed, alone = (MovingAverage(model, list(on_host.parameters), 0.7) for _ in range(2))
    on_host.follow(followed)
    for step in range(4):
        hidden = model[0](torch.randn(3, 4)) if step % 2 else torch.randn(3, 4)
        on_host.backward(model[2](model[1](hidden)).square().mean())
        on_host.step(step)
        for average in (followed, alone):
            average.update(step + 1)
    for name, value in followed.tensors().items():
        torch.testing.assert_close(value, alone.averages[name], msg=name)


def test_its_state_is_as_large_as_foreseen(tiny_size, batches):
    """A float32 copy of the blocks' weights is part of it whatever precision they are in."""
    model, optimisation = make(tiny_size, streamed=True)
    train(model, optimisation, batches, steps=1)
    use = Use(name="student", config={**tiny_size.transformer, "num_layers": 4}, latent_shape=(8, 1, 8, 8), dtype=torch.float32)
    work = Training(student=use.changed(trains="everything"), placing=Placing(name="offload"))
    tensors, _ = optimisation.state()
    assert sum(each.nbytes for each in tensors.values()) == pytest.approx(work.optimiser_bytes, rel=1e-3)


def test_the_state_of_another_placement_is_refused(tiny_size):
    (_, streamed), (_, ordinary) = make(tiny_size, True), make(tiny_size, False)
    for optimisation, other in ((streamed, ordinary), (ordinary, streamed)):
        with pytest.raises(UsageError, match="--placement offload"):
            optimisation.load_state(*other.state())


def test_small_updates_reach_weights_in_16_bits(tiny_size, batches):
    model, optimisation = make(tiny_size, True, dtype=torch.bfloat16, rate=1e-5, schedule="constant", warmup_steps=0)
    before = {name: value.float() for name, value in model.state_dict().items()}
    train(model, optimisation, batches)
    masters, _ = optimisation.state()
    moved = [(masters[f"master.{name}"] - before[name]).abs().max().item() for name in before if f"master.{name}" in masters]
    assert min(moved) > 2e-6


def test_what_an_update_raises_is_seen(tiny_size, batches, monkeypatch):
    model, optimisation = make(tiny_size, True, clip_norm=1.0)

    def fail(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr("wandistiller.memory.host_adamw.AdamW.step", fail)
    train(model, optimisation, batches, steps=1)
    with pytest.raises(MemoryError, match="no room"):
        train(model, optimisation, batches, start=1, steps=3)


@pytest.mark.parametrize(("options", "precision"), [({"name": "adafactor"}, "no"), ({}, "fp16")])
def test_what_it_cannot_do(tiny_size, options, precision):
    model = WanTransformer3DModel(**tiny_size.transformer)
    stream = stream_blocks(model, list(model.blocks), CPU, train=True)
    with pytest.raises(UsageError, match="trained with adamw"):
        HostOptimisation(dict(model.named_parameters()), stream, OptimiserOptions(**options), precision, CPU)
