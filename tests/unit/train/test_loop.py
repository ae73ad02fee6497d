"""The loop on a training that can be followed by hand."""

import os
import signal

import pytest
import torch
from helpers.toy_training import Collect, ToyMethod, ToyReader, make_loop, weights_of

from wandistiller.checkpoint.training_state import load_state
from wandistiller.data.loader import load_steps
from wandistiller.errors import TrainingError
from wandistiller.train.callbacks import Callback
from wandistiller.train.method import Advice, Role


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_sample_comes_once_an_epoch():
    loop = make_loop(steps=10, batch_size=3)
    loop.run()
    order = [index for batch in loop.method.seen for index in batch]
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]


@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 6), (2, 3), (3, 2)])
def test_accumulation_is_the_large_batch(batch_size, accumulation):
    reader = ToyReader(12)
    whole = make_loop(steps=6, batch_size=6, reader=reader)
    parts = make_loop(steps=6, batch_size=batch_size, accumulation=accumulation, reader=reader)
    whole.run()
    parts.run()
    for name, value in weights_of(whole).items():
        torch.testing.assert_close(weights_of(parts)[name], value, rtol=1e-5, atol=1e-6)


def test_a_short_batch_counts_by_its_samples():
    """Batches of 4 and 1 in one step: the gradient is the mean over five samples, not over two batches."""
    loop = make_loop(steps=1, batch_size=4, accumulation=2, reader=ToyReader(5), ema=False, clip_norm=None)
    batches = next(load_steps(loop._reader, loop._plan, start=0, rank=0, seed=3, workers=0))
    method = ToyMethod()
    inputs = torch.cat([batch.tensors["inputs"] for batch in batches])
    target = torch.cat([batch.tensors["target"] for batch in batches])
    assert [batch.num_samples for batch in batches] == [4, 1]
    error = (method.student.model(inputs).squeeze(-1) - target).square().mean()
    expected = torch.autograd.grad(error, list(method.student.model.parameters()))
    found = {}
    loop.optimisations["student"].step = lambda number: (
        found.update({name: p.grad.clone() for name, p in loop.method.student.trained_parameters.items()}) or torch.zeros(())
    )
    loop.run()
    for value, wanted in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(value, wanted)


@pytest.mark.parametrize("optimiser", ["adamw", "adafactor"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, optimiser, workers):
    options = {"workers": workers, "name": optimiser, "num_steps": 8, "schedule": "cosine", "warmup_steps": 3}
    straight = make_loop(steps=8, method=ToyMethod(dropout=0.3), **options)
    straight.run()
    make_loop(tmp_path, steps=4, method=ToyMethod(dropout=0.3), **options).run()
    torch.manual_seed(999)
    rest = make_loop(tmp_path, steps=8, method=ToyMethod(dropout=0.3), resume=True, **options)
    assert rest.step == 4
    torch.rand(7)  # whatever else the process drew before it resumed
    rest.load(load_state(rest._saves.states.newest()))
    rest.run()
    assert equal(weights_of(rest), weights_of(straight))
    averages = [loop._callbacks[-1].average.averages for loop in (rest, straight)]
    assert equal(*averages)
    assert rest.method.seen == straight.method.seen[4:]


@pytest.mark.parametrize(
    ("dtype", "rounding", "precision"),
    [
        (torch.bfloat16, "masters", "no"),
        (torch.bfloat16, "stochastic", "no"),
        (torch.float32, "masters", "bf16"),
        (torch.float32, "masters", "fp16"),
    ],
)
def test_it_resumes_in_every_precision(tmp_path, dtype, rounding, precision):
    options = {"rounding": rounding, "precision": precision}
    straight = make_loop(steps=6, method=ToyMethod(dtype=dtype), **options)
    straight.run()
    make_loop(tmp_path, steps=3, method=ToyMethod(dtype=dtype), **options).run()
    rest = make_loop(tmp_path, steps=6, method=ToyMethod(dtype=dtype), resume=True, **options)
    rest.run()
    assert equal(weights_of(rest), weights_of(straight))


class WideMethod(ToyMethod):
    """With a layer that is large enough for moments in 8 bits (from 4,096 numbers on)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = (torch.nn.Linear(4, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1))
        self.student.model = torch.nn.Sequential(*layers)


def test_moments_in_8_bits_resume_to_the_bit(tmp_path):
    options = {"name": "adamw8bit", "ema": False}
    straight = make_loop(steps=4, method=WideMethod(), **options)
    straight.run()
    make_loop(tmp_path, steps=2, method=WideMethod(), **options).run()
    state = load_state(tmp_path / "step-00000002")
    assert any(value.dtype == torch.uint8 and value.numel() == 4096 for value in state.tensors.values())
    rest = make_loop(tmp_path, steps=4, method=WideMethod(), resume=True, **options)
    rest.run()
    assert equal(weights_of(rest), weights_of(straight))


def test_the_metrics_are_means_over_the_samples():
    collect = Collect()
    loop = make_loop(steps=4, batch_size=10, callbacks=[collect], log_every=4, rate=0.0, weight_decay=0.0)
    loop.run()
    assert [value["step"] for value in collect.values] == [4]
    assert collect.values[0]["epoch"] == 4
    assert collect.values[0]["loss"] > 0
    assert collect.values[0]["rate"] == 0
    assert collect.values[0]["seconds_per_step"] > 0


@pytest.mark.parametrize("save_every", [0, 2])
def test_a_loss_that_is_not_a_number_stops_with_the_batch_named(tmp_path, save_every):
    loop = make_loop(tmp_path, steps=5, batch_size=1, reader=ToyReader(5, bad=2), log_every=100, save_every=save_every)
    with pytest.raises(TrainingError, match=r"is nan at step \d, on sample-2"):
        loop.run()
    newest = loop._saves.states.newest()
    if newest is not None:  # what was saved is from before
        assert all(torch.isfinite(value).all() for value in load_state(newest).tensors.values())


class Blaming(ToyMethod):
    """Its metric runs over in the third step, through another role's fault, and its loss does not; or its gradients do."""

    def __init__(self, what):
        super().__init__()
        self.roles["judge"] = Role("judge", torch.nn.Identity(), is_trained=False, advice=Advice("it is new.", "Wait."))
        self._what = what

    def losses(self, batch):
        losses = super().losses(batch)
        losses.culprits = {"error": "judge"}
        if batch.step == 2 and self._what == "metric":
            losses.metrics["error"] = losses.metrics["error"] * float("inf")
        if batch.step == 2 and self._what == "gradient":
            weight = self.student.model[0].weight
            losses.total = losses.total + (weight - weight.detach()).abs().sqrt().sum()  # 0, and its slope infinite
        return losses


@pytest.mark.parametrize(
    ("what", "message", "fix"),
    [
        ("metric", r"The metric 'error' of role 'judge' is inf at step 3, on sample-\d, sample-\d\.\n  why: it is new", "Wait"),
        (
            "gradient",
            r"The norm of all gradients of role 'student' is nan at step 3, on sample-\d, sample-\d\.",
            "--learning-rate",
        ),
    ],
)
def test_what_is_not_finite_is_blamed_on_its_role_before_anything_is_saved(tmp_path, what, message, fix):
    loop = make_loop(tmp_path, steps=5, method=Blaming(what), log_every=100, save_every=1)
    with pytest.raises(TrainingError, match=message) as caught:
        loop.run()
    assert fix in caught.value.fix
    newest = loop._saves.states.newest()
    assert newest.name == "step-00000002"
    assert all(torch.isfinite(value).all() for value in load_state(newest).tensors.values())


class Interrupt(Callback):
    def __init__(self, numbers, at):
        self._numbers, self._at = numbers, at

    def stepped(self, loop):
        if loop.step == self._at:
            for number in self._numbers:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice, as torchrun sends it on"])
def test_a_signal_saves_first(tmp_path, monkeypatch, number, times):
    if times > 1:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    straight = make_loop(steps=6)
    straight.run()
    loop = make_loop(tmp_path, steps=6, callbacks=[Interrupt([number] * times, 2)])
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    stopped = loop.run()
    assert (stopped.step, stopped.signal) == (2, number)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    rest = make_loop(tmp_path, steps=6, resume=True)
    assert rest.run().signal is None
    assert equal(weights_of(rest), weights_of(straight))


def test_old_states_are_retired(tmp_path):
    make_loop(tmp_path, steps=9, save_every=2, keep=2).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000009"]


def test_a_state_of_another_training_is_refused(tmp_path):
    make_loop(tmp_path, steps=2).run()
    other = make_loop(tmp_path, steps=4)
    other.method.student.model[0].bias.requires_grad_(False)
    with pytest.raises(TrainingError, match=r"another training: 0\.bias"):
        other.load(load_state(other._saves.states.newest()))


def test_clipping_limits_the_norm_of_all_gradients():
    collect = Collect()
    make_loop(steps=1, batch_size=10, callbacks=[collect], clip_norm=None, rate=0.0).run()
    norm = collect.values[0]["student/gradient_norm"]
    found = []
    loop = make_loop(steps=1, batch_size=10, clip_norm=norm / 3, rate=0.0)
    step = loop.optimisations["student"].optimiser.step
    loop.optimisations["student"].optimiser.step = lambda: (
        found.extend(p.grad.clone() for p in loop.method.student.model.parameters()) or step()
    )
    loop.run()
    total = torch.cat([gradient.flatten() for gradient in found]).norm()
    assert total.item() == pytest.approx(norm / 3, rel=1e-4)
