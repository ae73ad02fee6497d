"""Several ranks against one: the same samples, the same losses, the same weights to rounding."""

import json
import os
import shutil
import signal

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.torchrun import torchrun
from helpers.toy_training import Collect, ToyReader, make_loop, weights_of

from wandistiller.distributed.ranks import joined
from wandistiller.train.callbacks import Callback
from wandistiller.train.drawing import Drawing
from wandistiller.train.method import Role
from wandistiller.train.samples import DrawSamples


def be_rank(folder, steps, batch, accumulation, resume):
    collect = Collect()
    with joined(torch.device("cpu")) as ranks:
        options = {"steps": steps, "batch_size": batch, "accumulation": accumulation, "resume": resume, "num_steps": 12}
        loop = make_loop(folder / "states", **options, ranks=ranks, reader=ToyReader(12), callbacks=[collect])
        loop.run()
        seen = ranks.gather(loop.method.seen)
        if ranks.is_first:
            torch.save(weights_of(loop), folder / "weights.pt")
            (folder / "log.json").write_text(json.dumps({"losses": [v["loss"] for v in collect.values], "seen": seen}))


@pytest.fixture
def job(tmp_path):
    def run(ranks, steps, batch, accumulation=1, resume=False):
        run_ranks(ranks, be_rank, tmp_path, steps, batch, accumulation, resume, folder=tmp_path)
        return json.loads((tmp_path / "log.json").read_text()), torch.load(tmp_path / "weights.pt")

    return run


def alone(steps, batch):
    collect = Collect()
    loop = make_loop(steps=steps, batch_size=batch, reader=ToyReader(12), callbacks=[collect], num_steps=12)
    loop.run()
    return [value["loss"] for value in collect.values], weights_of(loop), loop.method.seen


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 1), (1, 2)])
def test_two_ranks_are_one_with_the_same_global_batch(job, batch, accumulation):
    log, weights = job(2, 6, batch, accumulation)
    losses, expected, _ = alone(6, 4)
    assert log["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
    together = [index for rank in log["seen"] for batch in rank[: 3 * accumulation] for index in batch]
    assert sorted(together) == list(range(12)), "each sample once an epoch, no overlap"


def test_two_ranks_stopped_and_resumed_are_the_same_to_the_bit(job, tmp_path):
    _, straight = job(2, 6, 2)
    shutil.rmtree(tmp_path / "states")
    job(2, 3, 2)
    _, resumed = job(2, 6, 2, resume=True)
    assert all(torch.equal(resumed[name], value) for name, value in straight.items())


def test_another_number_of_ranks_goes_on_where_the_data_was(job):
    """Three steps of two ranks, then three of one that takes the same global batch."""
    job(2, 3, 2)
    log, weights = job(1, 6, 4 // 2, 2, resume=True)
    losses, expected, _ = alone(6, 4)
    assert log["losses"] == pytest.approx(losses[3:], rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


class Interrupt(Callback):
    def __init__(self, step):
        self.step = step

    def stepped(self, loop):
        if loop.ranks.rank == 1 and loop.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def be_interrupted(folder, step):
    with joined(torch.device("cpu")) as ranks:
        stopped = make_loop(folder / "states", steps=6, ranks=ranks, callbacks=[Interrupt(step)]).run()
        found = ranks.gather((stopped.step, stopped.signal))
        if ranks.is_first:
            (folder / "ends.json").write_text(json.dumps(found))


@pytest.mark.parametrize("step", [2, 6], ids=["in the middle", "in the last step"])
def test_a_signal_to_one_rank_ends_all_of_them_alike(tmp_path, step):
    """Else one would write the result of a run that it takes for finished, and wait there for the others."""
    run_ranks(2, be_interrupted, tmp_path, step, folder=tmp_path)
    assert json.loads((tmp_path / "ends.json").read_text()) == [[step, 15], [step, 15]]
    assert (tmp_path / "states" / f"step-{step:08d}" / "state.json").exists()


class StoppedModel(torch.nn.Module):
    """Rank 1 alone is told to end, at its second call."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.calls = rank, 0

    def forward(self, noisy, times, text, return_dict):
        self.calls += 1
        if self.rank == 1 and self.calls == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return [noisy]


def be_interrupted_drawing(folder):
    shape = {"text": torch.zeros(5, 3, 4), "empty_text": torch.zeros(3, 4), "latent_shape": (2, 1, 4, 4)}
    way = {"num_steps": 20, "shift": 1.0, "solver": "euler", "cfg_scale": 1.0, "seed": 0, "dtype": torch.float32}
    with joined(torch.device("cpu")) as ranks:
        model = StoppedModel(ranks.rank)
        drawing = Drawing(prompts=["a ball"] * 5, **shape, **way)
        draws = DrawSamples(Role("student", model, is_trained=True), [drawing], list, folder / "samples", fps=16, every=2)
        stopped = make_loop(folder / "states", steps=6, ranks=ranks, callbacks=[draws]).run()
        found = ranks.gather((stopped.step, stopped.signal, model.calls))
        if ranks.is_first:
            (folder / "ends.json").write_text(json.dumps(found))


def test_a_signal_to_one_rank_ends_the_drawing_of_all(tmp_path):
    """At the same step of the solver: ranks that share a model compute each of them together."""
    run_ranks(2, be_interrupted_drawing, tmp_path, folder=tmp_path)
    assert json.loads((tmp_path / "ends.json").read_text()) == [[2, 15, 2], [2, 15, 2]]
    assert (tmp_path / "states" / "step-00000002" / "state.json").exists()
    assert not (tmp_path / "samples").exists()


# A thread of the process group that lives on can abort the process when the interpreter ends. What imports what, and when,
# decides about that: so this is a process that begins with nothing.
GROUP = """
import torch
from pathlib import Path
from helpers.toy_training import make_loop
from wandistiller.distributed.ranks import joined

with joined(torch.device("cpu")) as ranks:
    make_loop(steps=2, ranks=ranks).run()
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in threads if "gloo" in name], threads
"""


def test_no_thread_of_the_group_is_left(tmp_path):
    (tmp_path / "job.py").write_text(GROUP)
    done = torchrun(tmp_path / "job.py")
    assert done.returncode == 0, done.stderr
