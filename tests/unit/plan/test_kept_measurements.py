"""What the planner says now, against what was measured on a card and kept.

Left out is what another PyTorch than the measured one keeps for backward otherwise: nothing recomputed under autocast.
"""

import json
import runpy
from pathlib import Path

import pytest

from wandistiller.memory.estimates import margin
from wandistiller.memory.hardware import H200, Hardware
from wandistiller.units import Bytes

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FILES = {"sample": "planner", "train": "planner", "distill": "planner-distill"}
KEPT = {kind: json.loads((BENCHMARKS / "results" / f"{file}.json").read_text()) for kind, file in FILES.items()}
ON_HOST = ("1.3b video, offload", "5b video, offload, selective, to host")
"""Those that are updated on the host, whose memory others use too: no time is foreseen there to 15 %."""


@pytest.fixture
def works(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    kinds = runpy.run_path(str(BENCHMARKS / "tried.py"))["KINDS"]
    return {kind: dict(kinds[kind]()) for kind in KEPT}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("sample", "1.3b video, gpu"),
        ("sample", "5b 8 images, offload"),
        ("sample", "5b 8 images, offload, 10 resident"),
        ("sample", "5b image, offload, 8-bit"),
        ("sample", "5b video, offload, compiled"),
        ("sample", "14b clip, offload"),
        ("sample", "wan2.1-14b VAE, decode, bfloat16"),
        ("sample", "wan2.2-5b VAE, decode, bfloat16"),
        ("train", "1.3b image x16, full, accumulated"),
        ("train", "1.3b video, full"),
        ("train", "1.3b video, selective"),
        ("train", "1.3b video, selective, to host"),
        ("train", "1.3b video, full, compiled"),
        ("train", "1.3b video, adafactor"),
        ("train", "1.3b video, offload"),
        ("train", "5b video, bf16, stochastic, full"),
        ("train", "5b video, bf16, masters, selective"),
        ("train", "5b image x4, bf16, masters, none"),
        ("train", "5b video, offload, selective, to host"),
        ("train", "5b video, LoRA, full"),
        ("train", "5b video, LoRA, selective, offload"),
        ("distill", "14b to 1.3b, 8 images, guided, full, 8-bit teacher"),
        ("distill", "14b to 1.3b, clip, selective, teacher offloaded"),
    ],
)
def test_a_step_is_foreseen(works, kind, what, monkeypatch):
    kept = KEPT[kind]
    assert kept["expandable_segments"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    hardware = Hardware(card=H200, host_memory=Bytes(2**37), bus_rate=kept["bus_gb_per_second"] * 1e9)
    row = next(row for row in kept["rows"] if (row["job"], row["what"]) == (kind, what))
    phase = works[kind][what].phase(hardware)
    measured = row["measured_reserved_gib"] * 2**30
    assert abs(phase.reserved - measured) <= margin(Bytes(phase.reserved))
    assert phase.total("page-locked") == pytest.approx(row["measured_page_locked_gib"] * 2**30, rel=0.03)
    if what not in ON_HOST:
        assert phase.seconds == pytest.approx(row["measured_seconds"], rel=0.15)
