"""Distillation's losses against sums written out, with a teacher whose answers are known."""

import pytest
import torch
from torch import nn

from wandistiller.data.loader import Batch
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, MatchedBlocks, Objectives
from wandistiller.train.teacher import Answer


class ToyTransformer(nn.Module):
    """Each block multiplies tokens by a number; the velocity is what the last one gives."""

    def __init__(self, factors):
        super().__init__()
        self.blocks = nn.ModuleList(_Scale(factor) for factor in factors)

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict=False):
        hidden = hidden_states
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden,)


class _Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, hidden):
        return hidden * self.factor


class ToyTeacher:
    """Says 3 times what it is asked, 5 times where it is guided; its blocks' outputs are 2 and 3 times it."""

    def __init__(self):
        self.asked = []

    def answer(self, noisy, sigma, text, *, scale=1.0, blocks=()):
        self.asked.append((scale, tuple(blocks)))
        outputs = {0: 2 * noisy, 1: 3 * noisy}
        return Answer((5.0 if scale > 1 else 3.0) * noisy, [outputs[index] for index in blocks])


def make_batch(**more):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, 1, 3, 3)
    tensors = {"sigma": torch.tensor([0.25, 0.75]), "text": torch.zeros(2, 1, 1)}
    tensors |= {name: torch.randn(shape, generator=generator) for name in ("latents", "noise")}
    return Batch({**tensors, **more}, ("a", "b"), 0, 0)


def noisy_of(batch):
    sigma = batch.tensors["sigma"].view(-1, 1, 1, 1, 1)
    return (1 - sigma) * batch.tensors["latents"] + sigma * batch.tensors["noise"]


def make(objectives, factors=(1.5,), matched=None, teacher=None):
    role = Role("student", ToyTransformer(factors), is_trained=True)
    teacher = teacher or ToyTeacher()
    method = Distillation(role, teacher, objectives, guidance_scale=4.0, dtype=torch.float32, matched=matched)
    return method, teacher, role.model


def test_output_is_the_distance_to_the_teacher():
    method, _, _ = make(Objectives())
    batch = make_batch()
    expected = ((3.0 - 1.5) * noisy_of(batch)).square().mean()
    torch.testing.assert_close(method.losses(batch).total, expected)


def test_objectives_add_up_by_their_weights():
    batch = make_batch()
    method, teacher, _ = make(Objectives(output=2.0, guidance=0.5, data=0.25))
    noisy = noisy_of(batch)
    data = (1.5 * noisy - (batch.tensors["noise"] - batch.tensors["latents"])).square().mean()
    expected = 2.0 * (1.5 * noisy).square().mean() + 0.5 * (3.5 * noisy).square().mean() + 0.25 * data
    losses = method.losses(batch)
    torch.testing.assert_close(losses.total, expected)
    torch.testing.assert_close(losses.metrics["guidance_loss"], (3.5 * noisy).square().mean())
    assert [scale for scale, _ in teacher.asked] == [1.0, 4.0]


def test_features_of_matched_blocks_count_relative_to_the_teachers():
    batch = make_batch()
    matched = MatchedBlocks([0, 1], [0, 1])
    method, teacher, _ = make(Objectives(output=0.0, feature=1.0), factors=(1.0, 3.0), matched=matched)
    # The first block gives 1 instead of 2, the second 3 instead of 3: relative errors 1/4 and 0.
    torch.testing.assert_close(method.losses(batch).total, torch.tensor((0.25 + 0.0) / 2))
    assert teacher.asked == [(1.0, (0, 1))]


def test_features_of_a_narrower_student_are_compared_on_its_channels():
    noisy = torch.randn(2, 4, 1, 3, 3)
    found = [noisy[..., :2] * 2]
    loss = Distillation._feature_loss(found, [noisy * 2], MatchedBlocks([0], [0], torch.tensor([0, 1])))
    torch.testing.assert_close(loss, torch.tensor(0.0))


def test_a_stored_target_needs_no_teacher():
    batch = make_batch(target=torch.ones(2, 4, 1, 3, 3), noisy=torch.full((2, 4, 1, 3, 3), 2.0))
    for name in ("latents", "noise"):
        del batch.tensors[name]
    role = Role("student", ToyTransformer((1.5,)), is_trained=True)
    method = Distillation(role, None, Objectives(), guidance_scale=1.0, dtype=torch.float32)
    torch.testing.assert_close(method.losses(batch).total, torch.tensor(4.0))  # (1.5 * 2 - 1)^2


def test_only_the_student_learns_and_the_teachers_words_have_no_graph():
    batch = make_batch()
    method, _, model = make(Objectives())
    losses = method.losses(batch)
    losses.total.backward()
    # d/df mean((f x - 3 x)^2) = 2 (f - 3) mean(x^2)
    torch.testing.assert_close(model.blocks[0].factor.grad, 2 * (1.5 - 3.0) * noisy_of(batch).square().mean())
    assert not any(value.requires_grad for value in losses.metrics.values())


@pytest.mark.parametrize(("factor", "spread"), [(3.0, 1.0), (1.0, 0.0)])
def test_spread_says_how_much_of_the_teachers_variety_is_there(factor, spread):
    """At sigma 1 a student that says v = noisy predicts noisy - noisy = 0: no variety at all."""
    batch = make_batch(sigma=torch.ones(2))
    method, _, _ = make(Objectives(), factors=(factor,))
    found = method.losses(batch).metrics["health/spread"]
    torch.testing.assert_close(found, torch.tensor(spread), atol=1e-5, rtol=1e-5)
