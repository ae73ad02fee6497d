"""Scores of a teacher's layers against hooks on the model itself."""

import pytest
import torch

from wandistiller.distributed.ranks import read_ranks
from wandistiller.errors import CheckpointError, UsageError
from wandistiller.flow.path import interpolate
from wandistiller.models.load import load_model
from wandistiller.models.stored import TRANSFORMER, inspect_checkpoint
from wandistiller.train import layer_choice
from wandistiller.train.layer_choice import score_layers
from wandistiller.train.teacher import Teacher

CPU = torch.device("cpu")


class Shelf:
    """One model, in memory."""

    def __init__(self, model):
        self._model = model

    def index_at(self, timestep):
        return 0

    def expert(self, index):
        return self._model

    def keep_up(self):
        pass


class Samples:
    """Questions as a data set asks them, at a few sigmas; notes which were read."""

    sigmas = (0.95, 0.5, 0.1)

    def __init__(self):
        self.seen = []

    def __len__(self):
        return len(self.sigmas)

    def read(self, index, generator):
        latents = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(index))
        noise = torch.randn(latents.shape, generator=generator)
        found = {"latents": latents, "noise": noise, "sigma": torch.tensor(self.sigmas[index]), "text": torch.ones(16, 32)}
        self.seen.append(found)
        return found


@pytest.fixture(scope="module")
def stored(tiny_folder):
    return inspect_checkpoint(tiny_folder / "transformer", TRANSFORMER)


@pytest.fixture(scope="module")
def model(stored):
    return load_model(stored, dtype=torch.float32, device=CPU)


def score(folder, stored, model, samples, **options):
    teacher = Teacher(Shelf(model), torch.zeros(16, 32), device=CPU, dtype=torch.float32)
    return score_layers(folder, stored, teacher, samples, read_ranks(), device=CPU, **options)


@torch.no_grad()
def by_hooks(model, question):
    """Return 1 - the mean cosine between what goes into each block and what comes out."""
    found = []

    def note(module, inputs, output):
        found.append(1 - float(torch.nn.functional.cosine_similarity(inputs[0], output, dim=-1).mean()))

    hooks = [block.register_forward_hook(note) for block in model.blocks]
    latents, noise, sigma, text = (question[name][None] for name in ("latents", "noise", "sigma", "text"))
    model(interpolate(latents, noise, sigma), 1000 * sigma, text)
    for hook in hooks:
        hook.remove()
    return torch.tensor(found)


@pytest.mark.parametrize("most_numbers", [2**28, 1])
def test_a_score_is_the_mean_influence_over_the_questions(tmp_path, stored, model, monkeypatch, most_numbers):
    monkeypatch.setattr(layer_choice, "_MOST_NUMBERS", most_numbers)
    samples = Samples()
    found = score(tmp_path, stored, model, samples)
    assert len(samples.seen) == 8
    expected = torch.stack([by_hooks(model, question) for question in samples.seen]).mean(0)
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-6)


def test_an_expert_is_asked_about_its_own_noise_alone(tmp_path, stored, model):
    samples = Samples()
    found = score(tmp_path, stored, model, samples, low=0.875)
    mine = [question for question in samples.seen if question["sigma"] > 0.875]
    expected = torch.stack([by_hooks(model, question) for question in mine]).mean(0)
    assert len(mine) == 8 < len(samples.seen)
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-6)


def test_without_a_question_for_it_nothing_can_be_scored(tmp_path, stored, model):
    with pytest.raises(UsageError, match="--layer-choice spread"):
        score(tmp_path, stored, model, Samples(), low=0.99)


def test_scores_are_kept(tmp_path, stored, model):
    first = score(tmp_path, stored, model, Samples())
    samples = Samples()
    assert score(tmp_path, stored, model, samples, seed=1) == first and not samples.seen
    (tmp_path / layer_choice.FILE).write_text('{"teacher": "another", "scores": [1.0]}')
    with pytest.raises(CheckpointError, match="another teacher"):
        score(tmp_path, stored, model, samples)
