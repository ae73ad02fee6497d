"""Steps of the methods themselves, against what was foreseen of them: live tensors are counted on the CPU."""

import gc

import pytest
import torch
from helpers.live_bytes import LiveBytes

from wandistiller.data.loader import Batch
from wandistiller.memory.scene import Scene
from wandistiller.memory.uses import PixelDecoder, Use
from wandistiller.memory.works import Training
from wandistiller.models.sizes import SIZES, TINY_VAE
from wandistiller.plan.trial_models import Ends, build_placed
from wandistiller.plan.trial_steps import method_of, tensors_of
from wandistiller.train.method import Role

CPU = torch.device("cpu")
CONFIG = {**SIZES["tiny"].transformer, "num_layers": 4}
USE = Use(name="student", config=CONFIG, latent_shape=(8, 3, 16, 16), batch_size=2, text_tokens=8, dtype=torch.float32)
STUDENT = USE.changed(trains="everything")


def live_bytes(work):
    """Return the most that a real step of the method has at once beside weights and batch."""
    with Ends() as ends:
        _, model = build_placed(work.student, work.placing, CPU, ends)
        method = method_of(work, Role("student", model, is_trained=True), CPU, ends)
        batch = Batch(tensors_of(work.student, CPU), ("", ""), 0, 0)
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
