import psutil
import pytest
import torch

from wandistiller.memory import monitor
from wandistiller.units import Bytes


def test_the_cpus_memory_is_this_processs():
    memory = monitor.device_memory(torch.device("cpu"))
    assert memory.allocated == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert 0 < memory.free <= memory.total


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(monitor, "Path", lambda path: tmp_path)
    assert monitor.total_host_memory() == 1_000_000
    assert monitor.available_host_memory() == 600_000


@pytest.mark.parametrize("text", ["max", "9223372036854771712"])
def test_no_limit_is_no_limit(tmp_path, monkeypatch, text):
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(monitor, "Path", lambda path: tmp_path)
    assert monitor.total_host_memory() == psutil.virtual_memory().total


def test_the_line_for_progress_bars():
    assert monitor.memory_line(torch.device("cpu")).startswith("RAM: ")
    assert isinstance(monitor.total_host_memory(), Bytes)
