"""Remedies for a training that runs out of memory: what they propose is possible, and counts what a rank holds."""

from dataclasses import replace

import pytest

from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.memory.advice import in_order
from wandistiller.memory.hardware import H200, Hardware
from wandistiller.memory.out_of_memory import Failure
from wandistiller.models.shapes import Shapes
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.train import remedies
from wandistiller.train.remedies import find_distill_remedies, find_remedies, smaller_batches
from wandistiller.units import Bytes

RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "test"}


@pytest.fixture
def propose(monkeypatch):
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    size = SIZES["wan2.1-1.3b"]
    shapes = Shapes.of(size.vae, size.transformer)
    count = sum(each.numel() for each in build_empty(TRANSFORMER, size.transformer).parameters())

    def find(**options):
        config = TrainConfig(model="tiny", dataset_path="world:9:1x64x64", width=64, height=64, frames=(1,), **options)
        config.check()
        failure = Failure("device", Bytes(10**6), in_use=Bytes(10**9))
        found = list(find_remedies(config, shapes, failure))
        for remedy in found:
            replace(config, **remedy.changes).check()
        return {name: remedy.saves for remedy in found for name in remedy.changes}, count

    return find


@pytest.fixture
def shapes():
    return Shapes.of(SIZES["tiny"].vae, SIZES["tiny"].transformer)


def test_host_memory_of_a_training_on_the_cpu_is_what_it_computes_in(shapes):
    config = TrainConfig(model="tiny", dataset_path="world:9:1x64x64", width=64, height=64, frames=(1,), batch_size=4)
    on_cpu = find_remedies(config, shapes, Failure("host", None, computes_on_host=True))
    found = {name: remedy.saves for remedy in on_cpu for name in remedy.changes}
    assert found["batch_size"] > 0
    assert found["placement"] <= 0, "weights in host memory are no remedy"
    assert list(find_remedies(config, shapes, Failure("host", None))) == []
    kept = replace(config, activations_to_host=True, activation_policy="full")
    assert [remedy.changes for remedy in find_remedies(kept, shapes, Failure("host", None))] == [{"activations_to_host": False}]


def test_host_memory_of_a_distillation_is_spared_by_a_teacher_on_disk(monkeypatch):
    monkeypatch.setattr(remedies, "detect", lambda measures: Hardware(card=H200, host_memory=Bytes(2**37)))
    config = DistillConfig(
        teacher_path="tiny", dataset_path="world:9:1x64x64", width=64, height=64, teacher_device_strategy="offload"
    )
    config.check()
    size = SIZES["wan2.1-1.3b"]
    student = {**size.transformer, "num_layers": 4}
    found = find_distill_remedies(config, Shapes.of(size.vae, size.transformer), student, Failure("host", None, role="student"))
    (remedy,) = in_order(list(found))
    assert remedy.changes == {"teacher_device_strategy": "disk"}
    replace(config, **remedy.changes).check()


def test_ranks_with_the_whole_model_can_share_it(propose):
    found, count = propose()
    # Weights, gradients, what DDP exchanges of them, and two moments, in float32; the allocator's rounding comes on top.
    assert found["parallel"] == pytest.approx(20 * count * 3 / 4, rel=0.1)


SLICES = [{"parallel": "fsdp"}, {"parallel": "hsdp", "shard_size": 2}, {"parallel": "fsdp", "lora_rank": 4}]


@pytest.mark.parametrize("options", SLICES)
def test_ranks_with_slices_are_offered_what_goes_with_slices(propose, options):
    found, count = propose(**options)
    assert not {"parallel", "optimizer", "placement"} & found.keys()
    slices = options.get("shard_size", 4)
    if "lora_rank" in found:
        # Gradients, as they are exchanged too, and two moments; adapters of rank 32 have the same.
        assert 0.75 * 16 * count / slices < found["lora_rank"] < 16 * count / slices


@pytest.mark.parametrize("options", [{"optimizer": "adafactor"}, {"placement": "offload"}])
def test_short_weights_are_offered_with_the_rounding_that_goes_with_the_rest(propose, options):
    assert "rounding" in propose()[0]
    found, _ = propose(**options)
    assert "weights_dtype" in found and "rounding" not in found


@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 1), (4, 2), (9, 3), (15, 5)])
def test_more_batches_of_a_step_have_the_same_samples(before, after):
    changes = smaller_batches(TrainConfig(batch_size=before, gradient_accumulation=2))
    assert changes["batch_size"] == after
    assert changes["batch_size"] * changes["gradient_accumulation"] == 2 * before
