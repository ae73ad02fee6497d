"""Remedies for a training that runs out of memory: what they propose is possible, and counts what a rank holds."""

from dataclasses import replace

import pytest

from wandistiller.config.train import TrainConfig
from wandistiller.memory.out_of_memory import Failure
from wandistiller.models.shapes import Shapes
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, inspect_checkpoint
from wandistiller.train.remedies import find_remedies
from wandistiller.units import Bytes

RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "test"}


@pytest.fixture
def propose(tiny_folder, monkeypatch):
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    stored = inspect_checkpoint(tiny_folder / "transformer", TRANSFORMER)
    shapes = Shapes.of(SIZES["tiny"].vae, stored.config)

    def find(**options):
        config = TrainConfig(model="tiny", dataset_path="world:9:1x64x64", **options)
        config.check()
        failure = Failure("device", Bytes(10**6), in_use=Bytes(10**9))
        found = find_remedies(config, shapes, failure)
        for remedy in found:
            replace(config, **remedy.changes).check()
        return {name: remedy.saves for remedy in found for name in remedy.changes}, stored.num_parameters

    return find


def test_ranks_with_the_whole_model_can_share_it(propose):
    found, count = propose()
    assert found["parallel"] == pytest.approx(16 * count * 3 / 4, rel=0.01)


SLICES = [{"parallel": "fsdp"}, {"parallel": "hsdp", "shard_size": 2}, {"parallel": "fsdp", "lora_rank": 4}]


@pytest.mark.parametrize("options", SLICES)
def test_ranks_with_slices_are_offered_what_goes_with_slices(propose, options):
    found, count = propose(**options)
    assert not {"parallel", "optimizer", "placement"} & found.keys()
    slices = options.get("shard_size", 4)
    if "lora_rank" in found:
        # Gradients and two moments; a part of it is the allocator's rounding, and adapters of rank 32 come on top.
        assert 0.3 * 12 * count / slices < found["lora_rank"] < 12 * count / slices
