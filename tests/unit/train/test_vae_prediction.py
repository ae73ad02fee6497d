"""A long clip is told of by two short ones, and a hopeless one by a few frames; batches whose gradients are added up."""

import gc
from dataclasses import replace

import pytest
import torch
from helpers.live_bytes import LiveBytes

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.memory.hardware import described
from wandistiller.models.shapes import Shapes
from wandistiller.models.sizes import TINY_VAE, find_size
from wandistiller.plan.trial_models import Ends
from wandistiller.plan.trial_steps import vae_training
from wandistiller.train import vae_prediction
from wandistiller.train.vae_prediction import VaeStep, vae_step
from wandistiller.units import Bytes

CARD = described(card="rtx4090", host_memory=Bytes(2**36))


def test_two_short_clips_tell_of_a_longer_one(monkeypatch):
    monkeypatch.setattr(vae_prediction, "_SHORTER", 5)  # clips as short as a test should be
    monkeypatch.setattr(vae_prediction, "_LONGER", 9)
    step = VaeStep(config=TrainVaeConfig(batch_size=2), vae=TINY_VAE, shape=(13, 64, 64), precision="bf16")
    told, played = step.phase(CARD), step._phase(CARD, 1)
    assert told.peak == pytest.approx(played.peak, rel=0.03)
    assert told.seconds == pytest.approx(played.seconds, rel=0.03)
    least = step.least(CARD)
    assert 0.2 * played.peak < least.held + least.working < played.peak


def test_sizes_need_not_fit_the_patches_of_a_transformer():
    config = TrainVaeConfig(width=40, height=24, frames=(1,), max_aspect=1.0)
    shapes = Shapes.of(TINY_VAE, find_size("tiny").transformer)
    assert vae_step(config, shapes, CARD).shape == (1, 24, 40)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_least_is_never_more_than_the_prediction(is_checkpointed):
    """Also where most of it is gradients and weights in 16 bits, which are as large for any batch."""
    config = TrainVaeConfig(batch_size=8, vae_gradient_checkpointing=is_checkpointed)
    step = VaeStep(config=config, vae={**TINY_VAE, "base_dim": 96}, shape=(1, 16, 16), precision="bf16")
    least, phase = step.least(CARD), step.phase(CARD)
    assert 0.5 * phase.peak < least.held + least.working <= phase.peak


def sizes(phase):
    return {(item.role, item.kind): item.size for item in phase.items}


def test_gradients_are_counted_as_such():
    config = TrainVaeConfig(batch_size=1, gan_training=True)
    phase = VaeStep(config=config, vae=TINY_VAE, shape=(1, 32, 32), precision="no").phase(CARD)
    found = sizes(phase)
    weights = found[("vae", "weights")] + found[("critic", "weights")]
    assert found[("vae", "gradients")] == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize("has_critic", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_batches_of_a_step_and_their_gradients_are_there_together(accumulation, has_critic):
    """Live tensors of a real step are counted on the CPU, beside weights and what optimisers hold."""
    config = TrainVaeConfig(
        batch_size=1,
        gradient_accumulation=accumulation,
        training_steps=2,
        gan_training=has_critic,
        critic_width=8,  # so that the VAE's turn takes the most, as it does with pictures of any use
    )
    step = VaeStep(config=config, vae={**TINY_VAE, "base_dim": 32}, shape=(1, 48, 48), precision="no")
    with Ends() as ends:
        take = vae_training(step, torch.device("cpu"), ends)
        take(0)
        gc.collect()
        with LiveBytes() as live:
            take(1)
    phase = step.phase(CARD)
    held = sum(item.size for item in phase.items if item.kind in ("libraries", "weights", "optimiser", "batch"))
    assert phase.peak - held == pytest.approx(live.peak, rel=0.05)


def test_a_step_takes_as_long_as_its_batches_and_turns():
    once = VaeStep(config=TrainVaeConfig(batch_size=1), vae=TINY_VAE, shape=(1, 32, 32), precision="no")
    more = replace(once, config=TrainVaeConfig(batch_size=1, gradient_accumulation=2, training_steps=3))
    assert more.phase(CARD).seconds == pytest.approx(6 * once.phase(CARD).seconds)
    batches = sizes(more.phase(CARD))[("", "batch")]
    assert batches == 2 * sizes(once.phase(CARD))[("", "batch")] == 2 * 4 * 3 * 32 * 32
