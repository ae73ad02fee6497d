"""The loop on a training that can be followed by hand."""

import multiprocessing
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.toy_training import Collect, ToyMethod, ToyReader, make_loop, weights_of

from wandistiller.checkpoint.training_state import load_state
from wandistiller.data.loader import load_steps
from wandistiller.errors import TrainingError, UsageError
from wandistiller.train import step_clock
from wandistiller.train.callbacks import Callback, EverySoOften
from wandistiller.train.method import Advice, Role, Turn


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
@pytest.mark.parametrize(("workers", "accumulation"), [(0, 1), (2, 1), (0, 3)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, optimiser, workers, accumulation):
    options = {"workers": workers, "name": optimiser, "num_steps": 8, "schedule": "cosine", "warmup_steps": 3}
    options["accumulation"] = accumulation
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
    assert rest.method.seen == straight.method.seen[4 * accumulation :]


def test_metrics_of_an_interval_that_was_cut_are_of_all_of_it(tmp_path):
    whole, rest = Collect(), Collect()
    make_loop(tmp_path, steps=8, save_every=3, log_every=4, callbacks=[whole]).run()
    loop = make_loop(steps=8, log_every=4, callbacks=[rest])
    loop.load(load_state(tmp_path / "step-00000003"))
    loop.run()
    assert [values["loss"] for values in rest.values] == [values["loss"] for values in whole.values]
    assert len(rest.values) == 2


def test_random_numbers_of_every_kind_go_on(tmp_path):
    class Draw(Callback):
        def stepped(self, loop):
            found.append((random.gauss(0, 1), np.random.randn(), torch.randn(1).item()))

    found = []
    make_loop(tmp_path, steps=6, save_every=3, callbacks=[Draw()]).run()
    rest = make_loop(steps=6, callbacks=[Draw()])
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(999)
    rest.load(load_state(tmp_path / "step-00000003"))
    rest.run()
    assert found[6:] == found[3:6]


class Look(EverySoOften):
    """Draws random numbers of every kind, and notes which; it may note more."""

    def __init__(self, every, note=lambda loop: None):
        super().__init__(every)
        self._note, self.drawn = note, []

    def act(self, loop):
        self.drawn.append((random.gauss(0, 1), np.random.randn(), torch.randn(1).item()))
        self._note(loop)


def test_looks_at_the_model_leave_no_trace_in_the_training(tmp_path):
    """Nor in that of a run that goes on from a state of the same step, which has not drawn what they drew."""
    options = {"steps": 8, "save_every": 2}
    without, look, again = make_loop(steps=8, method=ToyMethod(dropout=0.3)), Look(2), Look(2)
    without.run()
    straight = make_loop(tmp_path, **options, keep=9, method=ToyMethod(dropout=0.3), callbacks=[look])
    straight.run()
    rest = make_loop(**options, method=ToyMethod(dropout=0.3), callbacks=[again])
    rest.load(load_state(tmp_path / "step-00000004"))
    rest.run()
    for loop in (straight, rest):
        assert equal(weights_of(loop), weights_of(without))
        assert equal(loop._callbacks[-1].average.averages, without._callbacks[-1].average.averages)
    assert len(look.drawn) == 4 and look.drawn[2:] == again.drawn


def test_a_state_that_is_due_is_there_before_anybody_looks_at_the_model(tmp_path):
    """With the average of its step: looks come after all that belongs to the step."""

    def note(loop):
        loop._saves._saving.wait()  # it is written beside the looks
        state = load_state(tmp_path / f"step-{loop.step:08d}")
        assert equal(state.part("callbacks/KeepAverage"), loop._callbacks[-1].average.averages)
        assert equal(state.part("roles/student"), weights_of(loop))
        found.append(loop.step)

    found = []
    make_loop(tmp_path, steps=6, save_every=2, callbacks=[Look(2, note)]).run()
    assert found == [2, 4, 6]


def test_the_average_takes_in_the_weights_after_each_step():
    """By its formula, from the weights that were there after steps 1, 2 and so on."""

    class Follow(Callback):
        def stepped(self, loop):
            for name, value in weights_of(loop).items():
                decay = min(0.9, (1 + loop.step) / (10 + loop.step))
                expected[name] = decay * expected[name] + (1 - decay) * value

    loop = make_loop(steps=6, callbacks=[Follow()])
    expected = weights_of(loop)
    loop.run()
    torch.testing.assert_close(loop._callbacks[-1].average.averages, expected)


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


def test_each_sample_counts_the_same_in_the_metrics():
    """An epoch of batches of 4, 4 and 2 samples."""
    collect, losses = Collect(), []
    loop = make_loop(steps=3, batch_size=4, callbacks=[collect], log_every=3, rate=0.0)
    original = loop.method.losses

    def note(batch):
        found = original(batch)
        losses.extend([found.total.item()] * batch.num_samples)
        return found

    loop.method.turns = (replace(loop.method.turns[0], losses=note),)
    loop.run()
    assert len(losses) == 10
    assert collect.values[0]["loss"] == pytest.approx(sum(losses) / 10, rel=1e-6)


@pytest.mark.parametrize("turns", [1, 2])
def test_the_schedule_counts_steps_whatever_a_step_is_made_of(turns):
    collect, method = Collect(), ToyMethod()
    method.turns *= turns
    loop = make_loop(steps=5, accumulation=3, method=method, callbacks=[collect], schedule="linear", warmup_steps=1, rate=1.0)
    loop.run()
    assert [value["rate"] for value in collect.values] == [0.5, 1.0, 0.75, 0.5, 0.25]
    assert len(method.seen) == 5 * 3 * turns


class Slow(EverySoOften):
    """Takes an hour of a clock that only this moves."""

    now = 0.0

    def act(self, loop):
        Slow.now += 3600.0


class Work(ToyMethod):
    """Takes two seconds a step of the same clock."""

    def losses(self, batch):
        Slow.now += 2.0
        return super().losses(batch)


@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4, 5]), (5, [5]), (0, [5])])
def test_what_is_done_every_so_often_is_done_at_the_end_but_not_after_an_interruption(tmp_path, every, expected):
    class Note(EverySoOften):
        def act(self, loop):
            found.append(loop.step)

    found = []
    make_loop(tmp_path, steps=5, callbacks=[Note(every), Interrupt([signal.SIGTERM], 3)]).run()
    assert found == [step for step in expected if step <= 3]
    make_loop(tmp_path, steps=5, callbacks=[Note(every)], resume=True).run()
    assert found == expected


def test_seconds_a_step_are_those_of_steps_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: Slow.now))
    collect = Collect()
    loop = make_loop(tmp_path, steps=6, method=Work(), callbacks=[collect, Slow(2)], save_every=3, log_every=2)
    monkeypatch.setattr(loop._saves, "save", lambda state, beside: Slow(0).act(loop))
    loop.run()
    assert [value["seconds_per_step"] for value in collect.values] == [2.0, 2.0, 2.0]
    assert loop.seconds_per_step == 2.0


@pytest.mark.parametrize("save_every", [0, 2])
def test_a_loss_that_is_not_a_number_stops_with_the_batch_named(tmp_path, save_every):
    loop = make_loop(tmp_path, steps=5, batch_size=1, reader=ToyReader(5, bad=2), log_every=100, save_every=save_every)
    with pytest.raises(TrainingError, match=r"is nan at step \d, on sample-2"):
        loop.run()
    newest = loop._saves.states.newest()
    if newest is not None:  # what was saved is from before
        assert all(torch.isfinite(value).all() for value in load_state(newest).tensors.values())


def test_no_worker_outlives_an_error(tmp_path):
    """Python waits for them when it ends, and they leave signals alone: a script would never come back."""
    before = set(multiprocessing.active_children())
    loop = make_loop(tmp_path, steps=5, batch_size=1, reader=ToyReader(5, bad=2), workers=2)
    with pytest.raises(TrainingError) as caught:
        loop.run()
    assert caught.tb is not None, "the traceback holds everything"
    assert set(multiprocessing.active_children()) <= before


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


def test_gradients_that_never_fit_into_float16_are_not_left_out_for_ever(tmp_path):
    """The loss is finite, and no loss scale helps: the run would go on without learning anything."""

    class Steep(ToyMethod):
        def losses(self, batch):
            found = super().losses(batch)
            weight = self.student.model[0].weight
            return replace(found, total=found.total + (weight - weight.detach()).abs().sqrt().sum())

    loop = make_loop(tmp_path, steps=60, precision="fp16", method=Steep())
    with pytest.raises(TrainingError, match=r"gradients of role 'student' .* float16 .* step 17, on sample-\d"):
        loop.run()


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_saves_first(tmp_path, number):
    """As schedulers of clusters, service managers and terminals send it: also to those that read ahead."""

    class InterruptAll(Callback):
        def stepped(self, loop):
            if loop.step == 2:
                everyone = [*(process.pid for process in multiprocessing.active_children()), os.getpid()]
                # By somebody else: workers end in peace if it comes from the process that they read for.
                subprocess.run(["kill", f"-{number}", *map(str, everyone)], check=True)
                time.sleep(0.1)  # in which a worker that died is noticed

    straight = make_loop(steps=6)
    straight.run()
    stopped = make_loop(tmp_path, steps=6, workers=2, callbacks=[InterruptAll()]).run()
    assert (stopped.step, stopped.signal) == (2, number)
    rest = make_loop(tmp_path, steps=6, workers=2, resume=True)
    assert rest.run().signal is None
    assert equal(weights_of(rest), weights_of(straight))


def test_a_turn_is_finished_with_its_new_weights():
    method, found = ToyMethod(), []
    bias = method.student.model[0].bias
    turn = Turn("student", method.losses, lambda: found.append(bias.detach().clone()))
    method.turns = (turn, turn)
    before = bias.detach().clone()
    make_loop(steps=1, method=method, accumulation=2).run()
    assert len(found) == 2
    assert not torch.equal(found[0], before) and not torch.equal(found[1], found[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_change_are_read_anew(workers):
    """From the step at which they change, however much was read ahead; the order goes on."""

    class Change(Callback):
        def stepping(self, loop):
            if loop.step == 3:
                loop.read_anew()
                loop._reader.targets += 100

    reader, order = ToyReader(), make_loop(steps=5)
    order.run()
    loop = make_loop(steps=5, reader=reader, workers=workers, callbacks=[Change()])
    found, original = [], loop.method.losses
    loop.method.turns = (replace(loop.method.turns[0], losses=lambda batch: found.append(batch) or original(batch)),)
    before = reader.targets.clone()
    loop.run()
    assert loop.method.seen == order.method.seen
    for step, batch in enumerate(found):
        torch.testing.assert_close(batch.tensors["target"], before[batch.tensors["index"]] + 100 * (step >= 3))


def test_old_states_are_retired(tmp_path):
    make_loop(tmp_path, steps=9, save_every=2, keep=2).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000009"]


def test_a_state_of_another_training_is_refused(tmp_path):
    make_loop(tmp_path, steps=2).run()
    other = make_loop(tmp_path, steps=4)
    other.method.student.model[0].bias.requires_grad_(False)
    with pytest.raises(UsageError, match=r"another training: 0\.bias"):
        other.load(load_state(other._saves.states.newest()))


def test_weights_of_another_shape_are_refused(tmp_path):
    make_loop(tmp_path, steps=2).run()
    method = ToyMethod()
    method.student.model[3] = torch.nn.Linear(8, 2)
    with pytest.raises(UsageError, match=r"another training: 3\.bias, 3\.weight of role 'student' do not match"):
        make_loop(tmp_path, steps=4, method=method, resume=True)


class WithCritic(ToyMethod):
    def __init__(self):
        super().__init__()
        self.roles["critic"] = Role("critic", torch.nn.Linear(1, 1), is_trained=True)


def test_a_role_that_the_state_does_not_have_is_named(tmp_path):
    make_loop(tmp_path, steps=2).run()
    with pytest.raises(UsageError, match="another training: it has no role 'critic'"):
        make_loop(tmp_path, steps=4, method=WithCritic(), resume=True)


def test_a_role_that_is_left_away_is_said(tmp_path, capfd):
    make_loop(tmp_path, steps=2, method=WithCritic()).run()
    make_loop(tmp_path, steps=4, resume=True)
    assert "The state has a role 'critic', which this run goes on without" in capfd.readouterr().err


def test_weights_that_mean_something_else_are_refused(tmp_path):
    def method(flags):
        found = ToyMethod()
        found.student.flags = flags
        return found

    make_loop(tmp_path, steps=2, method=method("--scale 1")).run()
    with pytest.raises(UsageError, match="made with --scale 1, and this one has --scale 2"):
        make_loop(tmp_path, steps=4, method=method("--scale 2"), resume=True)
    state = load_state(tmp_path / "step-00000002")
    state.facts.pop("roles")  # of an earlier version
    make_loop(steps=4, method=method("--scale 2")).load(state)


@pytest.mark.parametrize("steps", [4, 9], ids=["first epoch", "second epoch"])
@pytest.mark.parametrize(("batch_size", "again"), [(1, 0), (4, 0), (3, 2)])
def test_another_batch_size_goes_on_at_the_same_sample(tmp_path, capfd, steps, batch_size, again):
    """After eight of ten samples; batches of three have a border at six, and none is left out."""
    straight = make_loop(steps=10)
    straight.run()
    order = [index for batch in straight.method.seen for index in batch]
    make_loop(tmp_path, steps=steps).run()
    rest = make_loop(tmp_path, steps=steps + 4, batch_size=batch_size, resume=True)
    rest.run()
    seen = [index for batch in rest.method.seen for index in batch]
    assert seen[: 2 + again] == order[2 * steps - again : 2 * steps + 2]
    said = capfd.readouterr().err
    assert f"--batch-size was 2 and is {batch_size}: going on in epoch {1 + steps // 5} after {8 - again} of 10" in said
    assert ("2 come again" in said) == bool(again)


class Renamed(ToyReader):
    def name(self, index):
        return f"other-{index}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reader": ToyReader(12)}, "10 samples, and now there are 12"),
        ({"reader": Renamed()}, "had other names"),
        ({"seed": 4}, "--seed 3, and this run has --seed 4"),
    ],
)
def test_other_data_are_refused(tmp_path, change, message):
    make_loop(tmp_path, steps=2).run()
    with pytest.raises(UsageError, match=message):
        make_loop(tmp_path, steps=4, **change, resume=True)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"name": "adafactor"}, "--optimizer adamw, and this one has --optimizer adafactor"),
        ({"rounding": "stochastic"}, {}, "--rounding stochastic, and this one has .*--rounding masters"),
        ({}, {"rounding": "stochastic"}, "--rounding masters, and this one has .*--rounding stochastic"),
    ],
)
def test_the_state_of_another_optimiser_is_refused(tmp_path, before, after, message):
    dtype = torch.bfloat16 if "rounding" in {**before, **after} else torch.float32
    make_loop(tmp_path, steps=2, method=ToyMethod(dtype=dtype), **before).run()
    with pytest.raises(UsageError, match=message):
        make_loop(tmp_path, steps=4, method=ToyMethod(dtype=dtype), **after, resume=True)


def test_an_average_that_is_asked_for_later_begins_with_the_weights_of_the_state(tmp_path, capfd):
    first = make_loop(tmp_path, steps=2, ema=False)
    first.run()
    rest = make_loop(tmp_path, steps=4, resume=True)
    assert equal(rest._callbacks[-1].average.averages, weights_of(first))
    assert "begins with the weights of the state" in capfd.readouterr().err
    rest.run()


def test_an_average_that_is_left_away_is_said(tmp_path, capfd):
    make_loop(tmp_path, steps=2).run()
    make_loop(tmp_path, steps=4, ema=False, resume=True)
    assert "as --use-ema was not given" in capfd.readouterr().err


def test_states_of_earlier_versions_are_read(tmp_path):
    """They have a position, but neither what it depends on nor the flags of their optimisers."""
    straight = make_loop(steps=4)
    straight.run()
    make_loop(tmp_path, steps=2).run()
    state = load_state(tmp_path / "step-00000002")
    state.facts.pop("place")
    state.facts["optimisers"]["student"].pop("flags")
    rest = make_loop(steps=4)
    rest.load(state)
    rest.run()
    assert equal(weights_of(rest), weights_of(straight))


def test_loss_scaling_that_is_asked_for_later_begins_anew(tmp_path):
    make_loop(tmp_path, steps=2).run()
    assert make_loop(tmp_path, steps=4, precision="fp16", resume=True).run().step == 4


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
