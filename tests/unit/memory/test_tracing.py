"""What is predicted without a card, against what was measured on one, and against sums written out."""

import json
from pathlib import Path

import pytest
import torch

from wandistiller.memory.tracing import Workload, trace_transformer, tracing
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
GIB = 2**30
VIDEO = (48, 31, 44, 80)


def measured(file, what, way):
    rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
    return next(row for row in rows if row["what"] == what and row["way"] == way)


@pytest.mark.parametrize(
    ("what", "batch", "latents"),
    [("wan2.2-5b video, 27,280 tokens", 1, VIDEO), ("wan2.2-5b one image", 1, (48, 1, 44, 80))],
)
def test_a_forward_pass_takes_what_was_measured(what, batch, latents):
    row = measured("streaming-5b", what, "resident")
    config = SIZES["wan2.2-5b"].transformer
    found = trace_transformer(Workload(config=config, latent_shape=latents, batch_size=batch), num_steps=1)
    assert found.allocated / GIB == pytest.approx(row["peak_gib"], rel=0.01)
    assert found.reserved / GIB == pytest.approx(row["reserved_gib"], rel=0.01)


def test_a_training_step_takes_what_was_measured():
    row = measured("activations", "wan2.2-5b video, 27,280 tokens", "diffusers checkpointing, eager")
    workload = Workload(config=SIZES["wan2.2-5b"].transformer, latent_shape=VIDEO, is_trained=True, policy="full")
    found = trace_transformer(workload, num_steps=1)
    assert found.allocated / GIB == pytest.approx(row["peak_gib"], rel=0.03)
    assert found.reserved / GIB == pytest.approx(row["reserved_gib"], rel=0.03)


def test_weights_are_counted_to_the_byte():
    config = SIZES["tiny"].transformer
    workload = Workload(config=config, latent_shape=(8, 1, 8, 8))
    rounded = [-(-tensor.nbytes // 512) * 512 for tensor in build_empty(TRANSFORMER, config, dtype=torch.bfloat16).parameters()]
    buffers = [-(-tensor.nbytes // 512) * 512 for tensor in build_empty(TRANSFORMER, config, dtype=torch.bfloat16).buffers()]
    assert trace_transformer(workload).weights == sum(rounded) + sum(buffers)


def test_policies_keep_less_and_less():
    config = {**SIZES["wan2.1-1.3b"].transformer, "num_layers": 4}
    takes = {
        policy: trace_transformer(
            Workload(config=config, latent_shape=(16, 5, 32, 32), is_trained=True, policy=policy), num_steps=1
        ).allocated
        for policy in ("none", "selective", "full")
    }
    # A block keeps more than ten tensors of the size of its input, and under full recomputation that alone.
    one_input = 5 * 16 * 16 * 12 * 128 * 2
    assert takes["none"] - takes["full"] > 4 * 9 * one_input
    assert takes["none"] > takes["selective"] >= takes["full"]


def test_everything_that_died_is_given_back():
    with tracing() as trace:
        kept = torch.empty(1024, 1024)
        for _ in range(5):
            other = torch.empty(2**22)
            del other
        assert trace.model.allocated == kept.nbytes
        assert trace.model.peak_allocated == kept.nbytes + 2**24


def test_nothing_is_left_behind():
    plain = torch.nn.functional.rms_norm
    with tracing():
        assert torch.nn.functional.rms_norm is not plain
    assert torch.nn.functional.rms_norm is plain
    assert torch.nn.functional.rms_norm(torch.ones(2, 4), (4,)).tolist() == [[1.0] * 4] * 2
