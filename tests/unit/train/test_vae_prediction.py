"""A long clip is told of by two short ones, and a hopeless one by a few frames."""

import pytest

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.memory.hardware import described
from wandistiller.models.sizes import TINY_VAE
from wandistiller.train import vae_prediction
from wandistiller.train.vae_prediction import VaeStep
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
