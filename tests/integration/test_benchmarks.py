"""Benchmarks of whole commands still run: each at its smallest, on the CPU, without keeping a result."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("distill_teacher", ["--runs", "1"], "offloaded / resident"),
        ("distill_record", ["--teacher", "tiny-random"], "a pass, one clip"),
        ("commands", ["--match", "^sample, 1.3b, clip$"], "GiB"),
        ("demo_baselines", ["--only", "taught on pure noise"], "taught on pure noise"),
    ],
)
def test_a_benchmark_runs(name, flags, said, tmp_path, monkeypatch, capsys, some_box):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, "--small", "--output", str(tmp_path), *flags])
    monkeypatch.setattr("gc.collect", lambda: 0)  # half of the time, and no memory is measured here
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a small run keeps no result"
