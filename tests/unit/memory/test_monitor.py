import dataclasses

import psutil
import pytest
import torch

from wandistiller.memory import host_limits, monitor
from wandistiller.memory.advice import Remedy
from wandistiller.memory.monitor import DeviceMemory, Monitor
from wandistiller.units import Bytes


def test_the_cpus_memory_is_this_processs():
    memory = monitor.device_memory(torch.device("cpu"))
    assert memory.allocated == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert 0 < memory.free <= memory.total


def group(folder, limit, used):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")


def test_the_tightest_limit_up_the_tree_counts(tmp_path, monkeypatch):
    """As a job's limit inside of a user's inside of a container's."""
    group(tmp_path, 3_000_000, 900_000)
    group(tmp_path / "user", 1_000_000, 700_000)
    group(tmp_path / "user" / "job", "max", 400_000)
    monkeypatch.setattr(host_limits, "_cgroups", lambda: [(("memory.max", "memory.current"), tmp_path / "user" / "job")])
    assert host_limits.total_host_memory() == 1_000_000
    assert host_limits.available_host_memory() == 300_000


@pytest.mark.parametrize("text", ["max", "9223372036854771712"])
def test_no_limit_is_no_limit(tmp_path, monkeypatch, text):
    group(tmp_path, text, 5)
    monkeypatch.setattr(host_limits, "_cgroups", lambda: [(("memory.max", "memory.current"), tmp_path)])
    assert host_limits.total_host_memory() == psutil.virtual_memory().total


def test_this_processs_own_groups_are_found():
    for names, folder in host_limits._cgroups():
        assert len(names) == 2
        assert str(folder).startswith("/sys/fs/cgroup")


def test_the_line_for_progress_bars():
    assert monitor.memory_line(torch.device("cpu")).startswith("RAM: ")
    assert isinstance(host_limits.total_host_memory(), Bytes)


CPU = torch.device("cpu")
FIELDS = [field.name for field in dataclasses.fields(DeviceMemory)]


def memory(**values):
    return DeviceMemory(**{name: Bytes(values.get(name, 0)) for name in FIELDS})


def test_each_phase_has_its_own_peak(monkeypatch):
    """Nested phases too: what the inner one takes is not the outer one's."""
    now = {"peak": 0}
    monkeypatch.setattr(monitor, "device_memory", lambda device: memory(peak=now["peak"], free=50, total=100))
    watch = Monitor([CPU])
    with watch.phase("training"):
        now["peak"] = 10
        with watch.phase("sampling"):
            now["peak"] = 30
        now["peak"] = 12
    assert {phase: found.peak for (phase, _), found in watch.peaks.items()} == {"training": 12, "sampling": 30}
    assert watch.summary() == ["training on cpu: 12 B at the peak", "sampling on cpu: 30 B at the peak"]


def test_what_a_phase_held_and_gave_back_counts(monkeypatch):
    """A model that is gone when its phase ends was there: peaks are PyTorch's own, not what is held when one looks."""
    seen = iter([{}, {"peak": 5, "peak_reserved": 9}, {}, {"peak": 7, "peak_reserved": 8}])
    monkeypatch.setattr(monitor, "device_memory", lambda device: memory(reserved=1, **next(seen)))
    watch = Monitor([CPU])
    for _ in range(2):
        with watch.phase("denoising"):
            watch._fold_peak()
    found = watch.peaks["denoising", "cpu"]
    assert (found.peak, found.peak_reserved) == (7, 9)


@pytest.mark.skipif(not host_limits._forgets_peaks(), reason="needs a Linux that tells the peak of a process")
def test_the_peak_of_a_phase_on_the_cpu_is_what_it_had_and_gave_back():
    watch = Monitor([CPU])
    for size in (3 * 2**26, 2**26):
        with watch.phase(f"of {size}"):
            before = psutil.Process().memory_info().rss
            torch.ones(size, dtype=torch.uint8)
        assert watch.peaks[f"of {size}", "cpu"].peak - before == pytest.approx(size, rel=0.1)
    found = watch.observe()
    assert found[f"memory/cpu/peak_in_of_{size}_gb"] == pytest.approx((before + size) / 1e9, rel=0.05)


def test_a_full_device_is_told_once_with_what_would_help(monkeypatch):
    free, said = [16], []
    monkeypatch.setattr(monitor, "device_memory", lambda device: memory(free=free[0], total=100))
    remedy = Remedy(changes={"placement": "offload"}, saves=Bytes(2**30), slowdown=1.3)
    watch = Monitor([CPU], remedies=lambda failure: [remedy], warn=said.append)
    with watch.phase("training", "student"):
        watch.line()
        assert not said
        free[0] = 14
        watch.observe()
        watch.line()
    assert len(said) == 1
    assert "86 % full" in said[0].replace("%", " %").replace("  ", " ")
    assert "--placement offload: frees 1.0 GiB, about 1.3 times as long" in said[0]


def test_numbers_for_metrics():
    found = Monitor([CPU]).observe()
    assert found["memory/host_gb"] == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.05)
    assert found["memory/page_locked_gb"] == 0
