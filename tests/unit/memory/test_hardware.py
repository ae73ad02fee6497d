"""Cards by name, and times against what was measured on a card."""

import json
from pathlib import Path

import pytest
import torch

from wandistiller.errors import UsageError
from wandistiller.memory import rates
from wandistiller.memory.durations import step_seconds, streamed
from wandistiller.memory.hardware import CARDS, H200, Hardware, described, detect, find_card
from wandistiller.memory.monitor import DeviceMemory
from wandistiller.memory.rates import launch_seconds
from wandistiller.memory.ring_schedule import Ring
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Training
from wandistiller.models.sizes import SIZES
from wandistiller.units import Bytes

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
HERE = Hardware(card=H200, host_memory=Bytes(2**37), bus_rate=55.4e9)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200"),
        ("A100-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
    ],
)
def test_a_card_is_known_however_it_is_written(said, meant):
    assert find_card(said) is CARDS[meant]


def test_an_unknown_card_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="rtx4090"):
        find_card("rtx4091")
    with pytest.raises(UsageError):
        find_card("NVIDIA L40")  # which is no L4
    with pytest.raises(UsageError):
        find_card("NVIDIA GH200 480GB")  # which is no H200


def test_what_is_said_counts():
    found = described(card="rtx3090", gpu=Bytes(2**33), num_cards=2, host_memory=Bytes(2**36), bus_rate=1e10)
    assert found.card is not None and found.card.memory == 2**33 and found.card.attention == CARDS["rtx3090"].attention
    assert (found.num_cards, found.host_memory, found.bus_rate) == (2, 2**36, 1e10)
    assert described(num_cards=0, host_memory=Bytes(2**36)).card is None


@pytest.mark.parametrize(
    ("file", "what", "way", "size", "latents", "changes"),
    [
        ("streaming-5b", "wan2.2-5b video, 27,280 tokens", "resident", "wan2.2-5b", (31, 44, 80, 1), {}),
        ("streaming-5b", "wan2.2-5b one image", "resident", "wan2.2-5b", (1, 44, 80, 1), {}),
        ("streaming-5b", "wan2.2-5b 8 images", "resident, compiled", "wan2.2-5b", (1, 44, 80, 8), {"is_compiled": True}),
        ("streaming-14b", "wan2.1-14b 8 images", "resident", "wan2.1-14b", (1, 60, 104, 8), {}),
        (
            "activations-other-ways",
            "wan2.2-5b video, 27,280 tokens",
            "diffusers checkpointing, eager",
            "wan2.2-5b",
            (31, 44, 80, 1),
            {"trains": "everything", "policy": "full"},
        ),
    ],
)
def test_a_step_takes_as_long_as_was_measured(file, what, way, size, latents, changes):
    rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
    row = next(row for row in rows if row["what"] == what and row["way"] == way)
    config = SIZES[size].transformer
    *shape, batch = latents
    use = Use(name="student", config=config, latent_shape=(config["in_channels"], *shape), batch_size=batch, **changes)
    found = step_seconds(use.tape, use.repeats, HERE, is_compiled=use.is_compiled)
    assert found.total == pytest.approx(row["seconds"], rel=0.05)


def test_a_streamed_image_is_bound_by_the_bus():
    use = Use(name="student", config=SIZES["wan2.2-5b"].transformer, latent_shape=(48, 1, 44, 80))
    seconds = step_seconds(use.tape, use.repeats, HERE)
    alone = sum(use.block_bytes) / 55.4e9
    found = streamed(seconds, Ring(use.num_blocks, 0, 2), alone).total
    assert found == pytest.approx(alone)
    rows = json.loads((RESULTS / "streaming-5b.json").read_text())["rows"]
    row = next(row for row in rows if row["what"] == "wan2.2-5b one image" and row["way"] == "wandistiller, 2 slots")
    assert found == pytest.approx(row["seconds"], rel=0.05)


def test_ranks_keep_slices_and_exchange_what_a_ring_passes():
    """By hand: with fsdp, weights twice in 16 bits and float32 gradients once, each (n - 1) / n of the way."""
    config = {**SIZES["tiny"].transformer, "num_layers": 6}
    use = Use(
        name="student",
        config=config,
        latent_shape=(8, 1, 8, 8),
        text_tokens=8,
        dtype=torch.float32,
        trains="everything",
        precision="bf16",
    )
    count = sum(each.numel() for each in use.model.parameters())
    machine = described(card="h100", num_cards=4, host_memory=Bytes(2**36))
    assert machine.card is not None
    passed = {"ddp": 2 * 4 * count, "fsdp": 2 * 2 * count + 4 * count}
    for parallel, num_bytes in passed.items():
        seconds = Training(student=use, parallel=parallel).exchange_seconds(machine)
        assert seconds == pytest.approx(num_bytes * 3 / 4 / machine.card.link_rate)
    assert Training(student=use).exchange_seconds(described(card="h100", host_memory=Bytes(2**36))) == 0
    # With hsdp the same inside of a machine, for each of two batches; between two machines the sums of a slice, once.
    two = described(card="h100", num_cards=4, num_nodes=2, host_memory=Bytes(2**36), network_rate=1e9)
    inside, between = (2 * 2 * 2 * count + 4 * count) * 3 / 4, 2 * 4 * count / 4 * 1 / 2
    seconds = Training(student=use, parallel="hsdp", accumulation=2).exchange_seconds(two)
    assert seconds == pytest.approx(inside / machine.card.link_rate + between / 1e9)
    whole, slices = (Training(student=use, parallel=each).phase(machine) for each in ("ddp", "fsdp"))
    assert whole.exchange == pytest.approx(passed["ddp"] * 3 / 4 / machine.card.link_rate)
    sizes = [{item.kind: item.size for item in phase.items if item.where == "device"} for phase in (whole, slices)]
    assert sizes[1]["optimiser"] < sizes[0]["optimiser"] / 2 and sizes[1]["weights"] < sizes[0]["weights"] / 2


def test_the_hosts_rate_is_measured_where_it_is_asked_for():
    assert detect(measures=False).update_rate == 40e9
    here = detect()
    assert here.host_rate is None and here.update_rate > 1e8
    assert 1e-7 < launch_seconds(torch.device("cpu")) < 0.1


def test_a_card_that_nobody_knows_says_nothing_about_the_host(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Unheard-of 1")
    nothing, all_of_it = Bytes(0), Bytes(2**34)
    memory = DeviceMemory(*[nothing] * 4, free=all_of_it, total=all_of_it)
    monkeypatch.setattr("wandistiller.memory.monitor.device_memory", lambda device: memory)
    found = detect(measures=False)
    assert found.card.matmul["bfloat16"] == pytest.approx(1e14) and found.update_rate == 40e9


@pytest.mark.parametrize(("least", "runs", "median"), [(0.0, 6, 0.02), (0.15, 8, 0.011)])
def test_what_is_short_is_measured_for_longer(monkeypatch, least, runs, median):
    """A host that is busy now and then makes some of a few short runs several times as long."""
    now = 0.0
    lengths = [1.0, 0.01, 0.05, 0.02, 0.01, 0.04, 0.01, 0.011]  # the first is to warm up
    left = list(lengths)

    def work():
        nonlocal now
        now += left.pop(0)

    monkeypatch.setattr(rates.time, "perf_counter", lambda: now)
    assert rates._seconds(work, torch.device("cpu"), least=least) == pytest.approx(median)
    assert len(lengths) - len(left) == runs
