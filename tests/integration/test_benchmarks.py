"""Benchmarks of whole commands still run: each at its smallest, on the CPU, without keeping a result."""

import json
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


def test_what_was_measured_is_predicted_again(tmp_path, monkeypatch, capsys):
    kept = json.loads((BENCHMARKS / "results" / "planner-untried-22.json").read_text())
    rows = {row["what"].split()[0]: row for row in kept["rows"]}
    wrong = {**rows["22.9"], "measured_reserved_gib": 9.0, "measured_seconds": 9.0}
    file = tmp_path / "kept.json"
    file.write_text(json.dumps({**kept, "rows": [rows["22.9"], wrong, {**wrong, "what": "22.9 of old"}]}))
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["again", str(file), "--workers", "1"])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # as it was, when this is over
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    runpy.run_path(str(BENCHMARKS / "again.py"), run_name="__main__")
    first, *_ = lines = [line for line in capsys.readouterr().out.splitlines() if "22.9" in line or "trials" in line]
    assert "22.9 of old" in first and "is no more" in first
    assert "MEMORY" not in lines[1] and "TIME" not in lines[1] and "MEMORY TIME" in lines[2]
    assert lines[3] == "2 trials: memory within its bound in 1, time in 1"
