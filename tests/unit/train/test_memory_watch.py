"""What grows is told once, with how much a step and, if it is asked for, the lines that hold it."""

from types import SimpleNamespace

import pytest
import torch

from wandistiller.memory.allocation_sites import Growth
from wandistiller.memory.leak_watch import LeakWatch
from wandistiller.train import memory_watch
from wandistiller.train.memory_watch import WatchMemory
from wandistiller.units import Bytes


class Recorder:
    def __init__(self):
        self.baseline_at, self.is_closed = None, False

    def take_baseline(self):
        self.baseline_at = LOOP.step

    def write(self, path):
        path.write_text("snapshot")
        return [Growth("train.py:7 (keep)", Bytes(3 * 2**20))]

    def close(self):
        self.is_closed = True


LOOP = SimpleNamespace(step=0, device=torch.device("cuda"), batches=[SimpleNamespace(tensors={"latents": torch.zeros(1, 2)})])


@pytest.mark.parametrize("kind", ["device", "host", "page-locked"])
@pytest.mark.parametrize("has_snapshot", [False, True])
def test_growth_is_told_once_with_its_size_and_site(tmp_path, monkeypatch, kind, has_snapshot):
    said, path = [], tmp_path / "snapshot.pickle"
    monkeypatch.setattr(memory_watch, "say", said.append)
    monkeypatch.setattr(memory_watch, "AllocationRecorder", Recorder)
    watch = WatchMemory(LeakWatch(warmup_steps=95), path if has_snapshot else None)
    flat = {"device": 10**9, "host": 10**9, "page-locked": 10**9}
    monkeypatch.setattr(watch, "_observe", lambda device: {**flat, kind: 10**9 + 65536 * LOOP.step})
    watch.started(LOOP)
    for LOOP.step in range(1, 1201):
        watch.stepped(LOOP)
    recorder = watch._recorder
    watch.ended(LOOP)
    warnings = [line for line in said if line.startswith("Warning")]
    assert len(warnings) == 1
    assert f"{kind} memory grows by 64.0 KiB a step" in warnings[0]
    if has_snapshot:
        assert recorder.baseline_at == 100, "after the warm-up"
        assert recorder.is_closed
    assert path.exists() == (has_snapshot and kind == "device")
    advice = "train.py:7 (keep) holds 3.0 MiB more" if has_snapshot else "Run again with --memory-snapshot"
    assert any(advice in line for line in said) == (kind == "device")


def test_captions_of_other_lengths_are_no_other_bucket(monkeypatch):
    """Else hardly a step could be compared with another; nor does the order of accumulated batches matter."""
    seen = []
    watch = WatchMemory(LeakWatch(warmup_steps=0))
    monkeypatch.setattr(watch._watch, "observe", lambda step, kind, num_bytes, bucket: seen.append(bucket))
    monkeypatch.setattr(watch, "_observe", lambda device: {"device": 1})
    for length, sizes in ((3, (4, 8)), (5, (8, 4)), (5, (8, 8))):
        batches = [SimpleNamespace(tensors={"text": torch.zeros(1, length), "latents": torch.zeros(9, size)}) for size in sizes]
        watch.stepped(SimpleNamespace(step=10, device=torch.device("cpu"), batches=batches))
    assert seen[0] == seen[1] != seen[2]
