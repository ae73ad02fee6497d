"""Trials take real steps of every kind of work; figures of memory need a card (tests/gpu)."""

from types import SimpleNamespace

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.errors import UsageError
from wandistiller.memory.encoder_phases import Decoding, Encoding, TextEncoding
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.spread import Custom
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Adapters, PixelDecoder, Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.random_weights import RandomWeights
from wandistiller.models.sizes import SIZES, TINY_VAE
from wandistiller.plan import trial_models, trial_steps
from wandistiller.plan.trial import try_out
from wandistiller.plan.trial_steps import WARM_UPS
from wandistiller.train.optimisation import Optimisation
from wandistiller.train.vae_prediction import VaeStep

CPU = torch.device("cpu")
_TEXT = {
    "d_model": 16,
    "d_ff": 32,
    "d_kv": 8,
    "num_heads": 2,
    "num_layers": 3,
    "vocab_size": 32,
    "feed_forward_proj": "gated-gelu",
}
with torch.device("meta"):
    ENCODER = UMT5EncoderModel(UMT5Config(**_TEXT)).requires_grad_(False).eval()
USE = Use(name="student", config=SIZES["tiny"].transformer, latent_shape=(8, 1, 8, 8), text_tokens=8, dtype=torch.float32)


@pytest.mark.parametrize(
    "work",
    [
        Passes(use=USE, passes=2, held=(64,)),
        Passes(use=USE, placing=Placing(name="offload")),
        Passes(use=USE, placing=Placing(name="disk")),
        Passes(use=USE.changed(stored_dtype=torch.bfloat16), placing=Placing(name="disk")),
        Passes(use=USE, placing=Placing(name="cpu")),
        Training(student=USE.changed(trains="everything", policy="selective", to_host=True), averages=True),
        Training(student=USE.changed(trains="everything"), placing=Placing(name="offload"), accumulation=2),
        Training(
            student=USE.changed(trains="adapters", adapters=Adapters(2, ("to_q",)), policy="full"),
            placing=Placing(name="offload"),
            optimiser=OptimiserChoice("adafactor"),
        ),
        Training(
            student=USE.changed(trains="adapters", adapters=Adapters(2, ("to_q",))),
            placing=Placing(name="disk"),
        ),
        Training(
            student=USE.changed(trains="everything"),
            teacher=USE.changed(name="teacher"),
            teacher_placing=Placing(name="offload"),
            teacher_passes=2,
        ),
        Training(
            student=USE.changed(trains="everything", config={**SIZES["tiny"].transformer, "num_layers": 2}),
            teacher=USE.changed(name="teacher"),
            teacher_passes=2,
            matches_features=True,
        ),
        Training(student=USE.changed(trains="everything", pixels=PixelDecoder(TINY_VAE, is_checkpointed=True)), clips=False),
        Decoding(config=TINY_VAE, latent_shape=(8, 3, 4, 4), dtype=torch.float32),
        Encoding(config=TINY_VAE, pixel_shape=(3, 5, 32, 32), dtype=torch.float32),
        TextEncoding(encoder=ENCODER, placing="gpu"),
        TextEncoding(encoder=ENCODER, placing="offload", resident=1),
        TextEncoding(encoder=ENCODER, placing="disk"),
        VaeStep(
            config=TrainVaeConfig(
                batch_size=1, gradient_accumulation=2, gan_training=True, use_lpips=True, use_ema=True, r1_interval=1
            ),
            vae=TINY_VAE,
            shape=(5, 32, 32),
            precision="no",
        ),
    ],
    ids=[
        "guided",
        "streamed",
        "from disk",
        "from disk in another precision",
        "on the host",
        "trained",
        "trained and streamed",
        "adapters",
        "adapters, frozen weights from disk",
        "distilled",
        "features",
        "pixels",
        "decoded",
        "encoded",
        "text",
        "text streamed",
        "text from disk",
        "vae",
    ],
)
def test_steps_are_taken(work):
    assert try_out(work, CPU, num_steps=1).seconds > 0


@pytest.mark.parametrize(("rests", "expected"), [(False, [2] * 16), (True, [3] * 8)])
def test_a_teacher_that_rests_answers_while_steps_warm_up(rests, expected, monkeypatch):
    """Guided, and of two batches a step; one that is asked beforehand has batches of its own."""
    asked = []

    def call(model, use, inputs):
        asked.append(len(inputs["latents"]))
        return inputs["latents"]

    monkeypatch.setattr(trial_steps, "_call", call)
    teacher = USE.changed(name="teacher", batch_size=3 if rests else 2)
    student = USE.changed(trains="everything", batch_size=2)
    work = Training(student=student, teacher=teacher, teacher_passes=2, teacher_rests=rests, accumulation=2)
    try_out(work, CPU, num_steps=2)
    assert asked == expected


@pytest.mark.parametrize(("stored", "is_read"), [(None, True), (torch.bfloat16, False)])
def test_what_a_map_has_on_disk_is_written_for_a_trial(stored, is_read, tmp_path, monkeypatch):
    """And read from there, unless it is used in another precision: then it is kept."""
    file, footprints = tmp_path / "map.json", []
    file.write_text('{"": "cpu", "blocks.1": "disk"}')
    attach = Custom.attach

    def watch(placement, subject, device):
        placed = attach(placement, subject, device)
        footprints.append(placed.footprint)
        return placed

    monkeypatch.setattr(Custom, "attach", watch)
    use = USE.changed(stored_dtype=stored)
    try_out(Passes(use=use, placing=Placing(name="custom", device_map=file)), CPU, num_steps=1)
    block = sum(each.nbytes for each in use.model.get_submodule("blocks.1").parameters())
    assert footprints[0].disk == (block if is_read else 0)


def test_a_disk_without_room_is_said_before_anything_is_written(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(UsageError, match="where 1000 B are free"):
        try_out(Passes(use=USE, placing=Placing(name="disk")), CPU)


def test_steps_that_float16_leaves_out_are_not_those_that_count(monkeypatch):
    """Its losses are scaled by 65,536 at first, and gradients of random weights are no longer finite then."""
    made = []

    class Watched(Optimisation):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(trial_steps, "Optimisation", Watched)
    monkeypatch.setattr(trial_models, "RandomWeights", lambda model: LargeWeights(model))
    student = USE.changed(trains="everything", precision="fp16")
    try_out(Training(student=student, optimiser=OptimiserChoice("adafactor")), CPU, num_steps=1)
    assert made[0].loss_scale < 65536 / 2**WARM_UPS and made[0].optimiser.state


class LargeWeights(RandomWeights):
    """Weights with large gradients."""

    def __call__(self, name):
        return super().__call__(name) * (100.0 if "proj_out" in name else 1.0)
