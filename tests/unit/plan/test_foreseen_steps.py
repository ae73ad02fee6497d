"""Steps of the methods themselves, against what was foreseen of them: live tensors are counted on the CPU."""

import gc

import pytest
import torch
from helpers.live_bytes import LiveBytes

from wandistiller.memory.scene import Scene
from wandistiller.memory.uses import PixelDecoder, Use
from wandistiller.memory.works import Training
from wandistiller.models.sizes import SIZES, TINY_VAE
from wandistiller.plan import trial
from wandistiller.train.method import Role

CPU = torch.device("cpu")
CONFIG = {**SIZES["tiny"].transformer, "num_layers": 4}
USE = Use(name="student", config=CONFIG, latent_shape=(8, 3, 16, 16), batch_size=2, text_tokens=8, dtype=torch.float32)
STUDENT = USE.changed(trains="everything")


def live_bytes(work):
    """Return the most that a real step of the method has at once beside weights and batch."""
    with trial.ExitStack() as ends:
        _, model = trial._place(work.student, work.placing, CPU, ends)
        method = trial._method(work, Role("student", model, is_trained=True), CPU, ends)
        batch = trial.Batch(trial._tensors(work.student, CPU), ("", ""), 0, 0)
        method.losses(batch).total.backward()
        model.zero_grad()
        gc.collect()
        with LiveBytes() as live:
            method.losses(batch).total.backward()
        return live.peak


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_loss_in_pixels(is_checkpointed):
    student = STUDENT.changed(pixels=PixelDecoder(TINY_VAE, is_checkpointed))
    foreseen = Scene().play(student.tape, student.repeats).peak
    assert foreseen == pytest.approx(live_bytes(Training(student=student)), rel=0.05)


def test_matched_features():
    # Of a long clip: the two are largest at different moments, and what else differs then does not grow with it.
    student, teacher = (use.changed(latent_shape=(8, 17, 16, 16)) for use in (STUDENT, USE.changed(name="teacher")))
    plain, matched = (Training(student=student, teacher=teacher, matches_features=value) for value in (False, True))
    assert sum(matched._feature_bytes) == pytest.approx(live_bytes(matched) - live_bytes(plain), rel=0.01)
