import psutil
import pytest
import torch

from wandistiller.memory import monitor
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
    monkeypatch.setattr(monitor, "_cgroups", lambda: [(("memory.max", "memory.current"), tmp_path / "user" / "job")])
    assert monitor.total_host_memory() == 1_000_000
    assert monitor.available_host_memory() == 300_000


@pytest.mark.parametrize("text", ["max", "9223372036854771712"])
def test_no_limit_is_no_limit(tmp_path, monkeypatch, text):
    group(tmp_path, text, 5)
    monkeypatch.setattr(monitor, "_cgroups", lambda: [(("memory.max", "memory.current"), tmp_path)])
    assert monitor.total_host_memory() == psutil.virtual_memory().total


def test_this_processs_own_groups_are_found():
    for names, folder in monitor._cgroups():
        assert len(names) == 2
        assert str(folder).startswith("/sys/fs/cgroup")


def test_the_line_for_progress_bars():
    assert monitor.memory_line(torch.device("cpu")).startswith("RAM: ")
    assert isinstance(monitor.total_host_memory(), Bytes)
