"""What is drawn while training: it takes no more memory than a step, and the average only for as long as it draws."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from wandistiller.train import marks
from wandistiller.train.drawing import Drawing, draw
from wandistiller.train.marks import MeasureMarks

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
    found = {}
    metrics = SimpleNamespace(write=lambda loop, values: found.update(values))
    measure = MeasureMarks(SimpleNamespace(model=model), [drawing_of(5)], decode, metrics, every=1, at_once=at_once)
    measure.act(loop)
    assert max(model.batches) == min(at_once, 5) and sum(model.batches) == 2 * 5
    kinds = list(dict.fromkeys(model.events))
    assert kinds == ["average", "draws", "back", "decodes"]
    assert model.events.index("decodes") > model.events.index("back")
    assert 0 <= found["marks/overall"] < 1
