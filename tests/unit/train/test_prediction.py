"""What a distillation is foreseen to take, by when the teacher is asked."""

from dataclasses import replace

import pytest

from wandistiller.config.distill import DistillConfig
from wandistiller.memory.hardware import described
from wandistiller.models.shapes import Shapes
from wandistiller.models.sizes import find_size
from wandistiller.train.prediction import distill_phase, distill_work, media_phase
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
    found = distill_phase(config, work, hardware)
    alone, both = replace(work, teacher=None).phase(hardware), work.phase(hardware)
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
