"""What is drawn while training: it takes no more memory than a step, and the average only for as long as it draws."""

import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.toy_training import make_loop
from torch import nn

from wandistiller.train import marks
from wandistiller.train.drawing import Drawing, draw
from wandistiller.train.ema import MovingAverage
from wandistiller.train.marks import MeasureMarks
from wandistiller.train.samples import DrawSamples

CPU = torch.device("cpu")
CAPTION = "a large red circle at the centre on a white background"


class Model(nn.Module):
    """Notes how it is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.batches, self.caches, self.events = [], [], []

    def forward(self, noisy, times, text, return_dict):
        self.batches.append(len(noisy))
        self.caches.append(torch.is_autocast_cache_enabled())
        self.events.append("draws")
        return [noisy * self.weight]


def drawing_of(count):
    return Drawing(
        prompts=[CAPTION] * count,
        text=torch.zeros(count, 3, 4),
        empty_text=torch.zeros(3, 4),
        latent_shape=(2, 1, 4, 4),
        num_steps=2,
        shift=1.0,
        solver="euler",
        cfg_scale=1.0,
        seed=0,
        dtype=torch.float32,
    )


def test_weights_in_16_bits_are_not_kept_while_drawing():
    """Autocast would keep a copy of every weight until the pass has ended: another half of a model in float32."""
    model = Model()
    draw(model, drawing_of(1), [0], device=CPU, precision="bf16")
    assert model.caches == [False] * 2


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_marks_draw_some_at_once_and_decode_with_the_weights_back(monkeypatch, at_once):
    model = Model()

    @contextmanager
    def in_use(average):
        model.events.append("average")
        yield
        model.events.append("back")

    def decode(latents):
        model.events.append("decodes")
        return [torch.zeros(3, 1, 32, 32) for _ in latents]

    monkeypatch.setattr(marks, "in_use", in_use)
    ranks = SimpleNamespace(turns=lambda count: [(i, i < 4) for i in range(count)], mean=lambda sums: sums, is_first=False)
    loop = SimpleNamespace(device=CPU, options=SimpleNamespace(precision="no"), ranks=ranks, step=1)
    loop.heed_signals = lambda: None
    found = {}
    metrics = SimpleNamespace(write=lambda loop, values: found.update(values))
    measure = MeasureMarks(SimpleNamespace(model=model), [drawing_of(5)], decode, metrics, every=1, at_once=at_once)
    measure.act(loop)
    assert max(model.batches) == min(at_once, 5) and sum(model.batches) == 2 * 5
    kinds = list(dict.fromkeys(model.events))
    assert kinds == ["average", "draws", "back", "decodes"]
    assert model.events.index("decodes") > model.events.index("back")
    assert 0 <= found["marks/overall"] < 1


class Stopped(Model):
    """Somebody ends the run at its second call."""

    def forward(self, *inputs, **options):
        if len(self.batches) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(*inputs, **options)


def draw_samples(model, folder):
    drawing = replace(drawing_of(3), num_steps=20)
    average = MovingAverage(model, ["weight"], 0.9)
    average.averages["weight"] += 1
    role = SimpleNamespace(model=model)
    return DrawSamples(role, [drawing], lambda latents: pytest.fail("decodes"), folder, fps=16, every=2, average=average)


def measure_marks(model, folder):
    drawings = [replace(drawing_of(3), num_steps=20)]
    metrics = SimpleNamespace(write=lambda loop, values: pytest.fail("marks of nothing"))
    return MeasureMarks(SimpleNamespace(model=model), drawings, lambda latents: pytest.fail("decodes"), metrics, every=2)


@pytest.mark.parametrize(
    ("look", "what"),
    [(draw_samples, "the samples"), (measure_marks, "the marks of held-out captions")],
    ids=["samples", "marks"],
)
@pytest.mark.parametrize("steps", [6, 2], ids=["in the middle", "in the last step"])
def test_a_signal_ends_the_drawing_and_the_run_is_saved(tmp_path, capfd, look, what, steps):
    model = Stopped().train()
    stopped = make_loop(tmp_path / "states", steps=steps, callbacks=[look(model, tmp_path / "samples")]).run()
    assert (stopped.step, stopped.signal) == (2, signal.SIGTERM)
    assert len(model.batches) == 2, "of three times 20 steps of the solver"
    assert (tmp_path / "states" / "step-00000002" / "state.json").exists()
    assert not (tmp_path / "samples").exists()
    assert model.training and model.weight.item() == 1, "as it was before, not the average"
    assert capfd.readouterr().err.count(f"Step 2: left out {what}, because a signal came") == 1


def test_a_signal_between_pictures_ends_the_decoding(tmp_path):
    """Those that are written stay."""

    def decode(latents):
        yield torch.zeros(3, 1, 32, 32)
        os.kill(os.getpid(), signal.SIGTERM)
        yield torch.zeros(3, 1, 32, 32)
        pytest.fail("goes on")

    draws = DrawSamples(SimpleNamespace(model=Model()), [drawing_of(3)], decode, tmp_path / "samples", fps=16, every=2)
    stopped = make_loop(tmp_path / "states", steps=6, callbacks=[draws]).run()
    assert (stopped.step, stopped.signal) == (2, signal.SIGTERM)
    assert sorted(path.name[:2] for path in (tmp_path / "samples").rglob("*.png")) == ["00", "01"]
