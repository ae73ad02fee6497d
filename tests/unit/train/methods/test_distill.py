"""Distillation's losses against sums written out, with a teacher whose answers are known."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from wandistiller.data.batches import MicroBatch
from wandistiller.data.buckets import Bucket
from wandistiller.data.cached_samples import Randomness
from wandistiller.data.loader import Batch, read_batch
from wandistiller.data.prompt_samples import PromptSamples
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.models.channel_adapter import ChannelAdapter
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, MatchedBlocks, Objectives, Stretches, _feature_loss, _health
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
        self.asked, self.sigmas = [], []

    def answer(self, noisy, sigma, text, *, scale=1.0, blocks=()):
        self.sigmas.append(sigma)
        self.asked.append((scale, tuple(blocks)))
        outputs = {0: 2 * noisy, 1: 3 * noisy}
        return Answer((5.0 if scale > 1 else 3.0) * noisy, 3.0 * noisy, [outputs[index] for index in blocks])


def make_batch(**more):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, 1, 3, 3)
    tensors = {"sigma": torch.tensor([0.25, 0.75]), "text": torch.zeros(2, 1, 1)}
    tensors |= {name: torch.randn(shape, generator=generator) for name in ("latents", "noise")}
    return Batch({**tensors, **more}, ("a", "b"), 0, 0)


def noisy_of(batch):
    sigma = batch.tensors["sigma"].view(-1, 1, 1, 1, 1)
    return (1 - sigma) * batch.tensors["latents"] + sigma * batch.tensors["noise"]


def make(objectives, factors=(1.5,), matched=None, teacher=None, **options):
    role = Role("student", ToyTransformer(factors), is_trained=True)
    teacher = teacher or ToyTeacher()
    method = Distillation(role, teacher, objectives, guidance_scale=4.0, dtype=torch.float32, matched=matched, **options)
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
    assert [scale for scale, _ in teacher.asked] == [4.0], "one answer has both"


def test_features_of_matched_blocks_count_relative_to_the_teachers():
    batch = make_batch()
    matched = MatchedBlocks([0, 1], [0, 1])
    method, teacher, _ = make(Objectives(output=0.0, feature=1.0), factors=(1.0, 3.0), matched=matched)
    # The first block gives 1 instead of 2, the second 3 instead of 3: relative errors 1/4 and 0.
    torch.testing.assert_close(method.losses(batch).total, torch.tensor((0.25 + 0.0) / 2))
    assert teacher.asked == [(1.0, (0, 1))]


def test_features_of_a_narrower_student_are_compared_on_its_channels():
    noisy = torch.randn(2, 4, 1, 3, 3)
    found, wanted = [noisy[..., :2] * 2], [noisy * 2]
    loss = _feature_loss(found, wanted, MatchedBlocks([0], [0], torch.tensor([0, 1])))
    torch.testing.assert_close(loss, torch.tensor(0.0))
    assert not found and not wanted, "their memory is free for what comes"


def test_a_stored_target_needs_no_teacher():
    batch = make_batch(target=torch.ones(2, 4, 1, 3, 3), noisy=torch.full((2, 4, 1, 3, 3), 2.0))
    for name in ("latents", "noise"):
        del batch.tensors[name]
    role = Role("student", ToyTransformer((1.5,)), is_trained=True)
    method = Distillation(role, None, Objectives(), guidance_scale=1.0, dtype=torch.float32)
    torch.testing.assert_close(method.losses(batch).total, torch.tensor(4.0))  # (1.5 * 2 - 1)^2


def test_a_student_of_other_channels_is_asked_and_answered_through_its_adapter():
    """Data are centred, mapped and divided, noise is mapped alone; a velocity is what is between the two of them."""
    matrix = torch.linalg.qr(torch.randn(4, 2, generator=torch.Generator().manual_seed(1)))[0].T.contiguous()
    mean, std = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.5, 2.0])

    def mapped(noise):
        return torch.einsum("sc,bcfhw->bsfhw", matrix, noise)

    def down(data):
        return mapped(data - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1)

    batch = make_batch()
    sigma, noisy = batch.tensors["sigma"].view(-1, 1, 1, 1, 1), noisy_of(batch)
    # The teacher says 3 * noisy, which is noise less data; the student 1.5 times what it is given.
    data, noise = down(noisy - sigma * 3 * noisy), mapped(noisy + (1 - sigma) * 3 * noisy)
    given = (1 - sigma) * data + sigma * noise
    method, _, _ = make(Objectives(), adapter=ChannelAdapter(matrix, mean, std))
    torch.testing.assert_close(method.losses(batch).total, (1.5 * given - (noise - data)).square().mean())
    # Of several targets the teacher's says what the student is given.
    real = mapped(batch.tensors["noise"]) - down(batch.tensors["latents"])
    both, _, _ = make(Objectives(data=1.0), adapter=ChannelAdapter(matrix, mean, std))
    torch.testing.assert_close(both.losses(batch).metrics["data_loss"], (1.5 * given - real).square().mean())
    data, noise = down(batch.tensors["latents"]), mapped(batch.tensors["noise"])
    errors = (1.5 * ((1 - sigma) * data + sigma * noise) - (noise - data)).square().flatten(1).mean(1)
    torch.testing.assert_close(method.held_out_errors(batch.tensors), errors)


def test_the_student_is_given_the_beginning_of_captions_and_the_teacher_all():
    class Listener(ToyTransformer):
        def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict=False):
            heard.append(encoder_hidden_states)
            return super().forward(hidden_states, timestep, encoder_hidden_states)

    class ListeningTeacher(ToyTeacher):
        def answer(self, noisy, sigma, text, **options):
            heard.append(text)
            return super().answer(noisy, sigma, text, **options)

    heard: list[torch.Tensor] = []
    text = torch.arange(1.0, 9.0).view(2, 4, 1)
    role = Role("student", Listener((1.5,)), is_trained=True)
    options = {"guidance_scale": 1.0, "dtype": torch.float32, "max_text_tokens": 3}
    Distillation(role, ListeningTeacher(), Objectives(), **options).losses(make_batch(text=text))
    assert torch.equal(heard[0], text)
    assert torch.equal(heard[1][:, :3], text[:, :3]) and not heard[1][:, 3:].any()


def test_only_the_student_learns_and_the_teachers_words_have_no_graph():
    batch = make_batch()
    method, _, model = make(Objectives())
    losses = method.losses(batch)
    losses.total.backward()
    # d/df mean((f x - 3 x)^2) = 2 (f - 3) mean(x^2)
    torch.testing.assert_close(model.blocks[0].factor.grad, 2 * (1.5 - 3.0) * noisy_of(batch).square().mean())
    assert not any(value.requires_grad for value in losses.metrics.values())


def test_noise_for_prompts_is_asked_about_on_one_side_of_the_boundary():
    """Experts take turns: each has a batch whose sigmas follow the quantile function cut to its own range."""
    sigma = SigmaDistribution(shape="logit_normal", shift=3.0)
    prompts = SimpleNamespace(name=str)
    texts = SimpleNamespace(trims_text=False, empty_text=torch.zeros(1, 1), read=lambda index: torch.zeros(1, 1))
    samples = PromptSamples(prompts, texts, 8, Bucket(1, 24, 24), (4, 1, 3, 3), Randomness(sigma=sigma))
    batch = read_batch(samples, MicroBatch(0, 0, tuple(range(8))), seed=0)
    places = batch.tensors["place"].tolist()
    assert batch.tensors["sigma"].tolist() == pytest.approx([sigma.quantile(place) for place in places])
    turns = [replace(sigma, low=0.875), replace(sigma, high=0.875)]
    method, teacher, _ = make(Objectives(), stretches=Stretches(turns, 10))
    for batch.step in (0, 10):
        method.losses(batch)
    for found, turn in zip(teacher.sigmas, turns, strict=True):
        assert found.tolist() == pytest.approx([turn.quantile(place) for place in places])
    assert teacher.sigmas[0].min() >= 0.875 >= teacher.sigmas[1].max()


@pytest.mark.parametrize(("factor", "spread"), [(3.0, 1.0), (1.0, 0.0)])
def test_spread_says_how_much_of_the_teachers_variety_is_there(factor, spread):
    """At sigma 1 a student that says v = noisy predicts noisy - noisy = 0: no variety at all."""
    batch = make_batch(sigma=torch.ones(2))
    method, _, _ = make(Objectives(), factors=(factor,))
    found = method.losses(batch).metrics["health/spread"]
    torch.testing.assert_close(found, torch.tensor(spread), atol=1e-5, rtol=1e-5)


def health_of(data, factor, frames):
    """Return what is said at sigma 1 of a student whose data are ``factor`` times the teacher's, which are ``data``.

    A velocity v of noisy latents z at sigma 1 means the data z - v. The teacher says 3 z, so its data are -2 z; the student
    (1 + 2 factor) z, so its are factor times as much.
    """
    noisy = -0.5 * data.view(1, 1, frames, 1, -1)
    batch = make_batch(sigma=torch.ones(1), noisy=noisy, text=torch.zeros(1, 1, 1))
    method, _, _ = make(Objectives(), factors=(1 + 2 * factor,))
    return method.losses(batch).metrics


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_motion_is_the_size_of_what_changes_from_frame_to_frame(factor):
    data = torch.tensor([[0.0, 1.0], [2.0, 1.5], [1.0, -3.0]])
    found = health_of(data, factor, frames=3)
    assert float(found["health/motion"]) == pytest.approx(factor, abs=1e-6)
    assert float(found["health/spread"]) == pytest.approx(factor, abs=1e-6)
    assert "health/motion" not in health_of(data, factor, frames=1)


def test_a_clip_that_should_stand_still_has_too_much_motion_if_it_moves():
    noisy = torch.ones(1, 1, 2, 1, 2)
    still, moving = noisy.clone(), noisy.clone()
    moving[:, :, 1] += 0.5
    found = _health(noisy, torch.ones(1), noisy - moving, noisy - still)
    # The root of 0.25 over the least that motion is taken for, 1e-6.
    assert float(found["health/motion"]) == pytest.approx(500.0)


@pytest.mark.parametrize(("factor", "saturation"), [(1.0, 0.0), (2.0, 0.4), (0.5, -0.2), (0.0, -0.2)])
def test_saturation_is_the_share_of_values_far_out_beyond_the_teachers(factor, saturation):
    """Far out is beyond 4: of these values 5 is; of twice these 5, 3 and -2.5 are; of half of them none."""
    found = health_of(torch.tensor([5.0, 3.0, -2.5, 1.0, 0.0]), factor, frames=1)
    assert float(found["health/saturation"]) == pytest.approx(saturation)
