"""What a distillation is foreseen to take, by when the teacher is asked."""

from dataclasses import replace

import pytest

from wandistiller.config.distill import DistillConfig
from wandistiller.data.buckets import Bucket
from wandistiller.memory.hardware import described
from wandistiller.models.shapes import Shapes
from wandistiller.models.sizes import find_size
from wandistiller.train.prediction import distill_work, drawn_pixels, media_phase
from wandistiller.units import Bytes

LIVE = DistillConfig(teacher_path="x", dataset_path="y", width=64, height=64, frames=(1,), batch_size=2, rollout_batch=5)


@pytest.mark.parametrize(
    ("changes", "is_beside", "is_in_every_step"),
    [({}, True, True), ({"cache_teacher": True}, False, False), ({"cache_teacher": True, "refresh_every": 9}, True, False)],
)
def test_a_teacher_counts_where_it_is_asked(changes, is_beside, is_in_every_step):
    size = find_size("tiny")
    config, shapes = replace(LIVE, **changes), Shapes.of(size.vae, size.transformer)
    hardware = described(card="rtx4090", host_memory=Bytes(2**36))
    work = distill_work(config, shapes, {**size.transformer, "num_layers": 1}, hardware, (1, 64, 64))
    assert (work.teacher is not None) == is_beside
    found = work.phase(hardware)
    alone, both = (replace(work, **changes).phase(hardware) for changes in ({"teacher": None}, {"teacher_rests": False}))
    if work.teacher is not None:
        assert work.teacher.batch_size == (5 if config.cache_teacher else 2)
        assert both.peak > alone.peak and both.seconds > alone.seconds
    assert found.peak == both.peak
    assert found.seconds == (both if is_in_every_step else alone).seconds


def test_media_are_foreseen_in_the_precision_that_they_are_encoded_in():
    size = find_size("tiny")
    shapes, hardware = Shapes.of(size.vae, size.transformer), described(card="rtx4090", host_memory=Bytes(2**36))
    names = ("float32", "bfloat16", "auto")
    full, half, follows = (media_phase(replace(LIVE, vae_dtype=name), shapes, hardware).peak for name in names)
    assert half == follows < full


@pytest.mark.parametrize(
    ("options", "latents"),
    [({"sample_every": 1}, (2, 8, 8)), ({"judge_samples": 1}, (3, 4, 4)), ({"sample_every": 1, "judge_samples": 1}, (2, 8, 8))],
    ids=["samples", "marks", "both"],
)
def test_the_largest_that_is_drawn_counts(options, latents):
    """Samples are as the data, where a picture comes first; marks as the held-out data. A latent is 8x8 pixels."""
    size, data, held_out = (
        find_size("tiny"),
        [Bucket(1, 64, 64), None, Bucket(5, 64, 64)],
        [Bucket(1, 32, 32), Bucket(9, 32, 32)],
    )
    config, shapes = replace(LIVE, **options), Shapes.of(size.vae, size.transformer)
    hardware, drawn = described(card="rtx4090", host_memory=Bytes(2**36)), drawn_pixels(config, data, held_out)
    drawing = distill_work(config, shapes, dict(size.transformer), hardware, (5, 64, 64), drawn).drawing
    assert drawing.decoding.latent_shape == drawing.student.latent_shape == (size.vae["z_dim"], *latents)
    assert drawn_pixels(LIVE, data, held_out) is None
