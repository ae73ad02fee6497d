"""What a run leaves in its files and on the screen."""

import json
import re

import pytest
from helpers.toy_training import ToyReader, make_loop

from wandistiller.train import metrics
from wandistiller.train.metrics import ShowProgress, WriteMetrics, drop_lines_after


def test_a_line_for_logs(monkeypatch):
    said = []
    monkeypatch.setattr(metrics, "say", said.append)
    make_loop(steps=12, batch_size=2, reader=ToyReader(10), callbacks=[ShowProgress(lambda: "GPU: 14.2GB")], log_every=4).run()
    pattern = r"\[00:00:\d\d\] Epoch (\d)/3 \| Batch (\d)/5 \| \d+ms/batch \| GPU: 14\.2GB \| ETA: 00:00:0\d \| loss \d+\.\d{4}"
    found = [re.fullmatch(pattern, line) for line in said]
    assert [(match[1], match[2]) for match in found] == [("1", "4"), ("2", "3"), ("3", "2")]


@pytest.mark.parametrize(
    ("accumulation", "steps", "expected"),
    [
        (2, 10, ["1 1 4 3", "1 2 4 3", "2 1 4 3", "2 2 4 3", "2 3 4 3", "3 1 4 3", "3 2 4 3", "4 1 4 3", "4 2 4 3", "4 3 4 3"]),
        (10, 2, ["2 1 4 1", "4 1 4 1"]),
    ],
)
def test_epochs_are_those_of_the_data_also_where_a_step_ends_in_the_next(monkeypatch, accumulation, steps, expected):
    """Five batches an epoch: ten steps of two, or two steps of ten, are four epochs."""
    said = []
    monkeypatch.setattr(metrics, "say", said.append)
    make_loop(steps=steps, accumulation=accumulation, callbacks=[ShowProgress(lambda: "")]).run()
    found = [re.search(r"Epoch (\d+)/(\d+) \| Batch (\d+)/(\d+) ", line) for line in said]
    assert [f"{match[1]} {match[3]} {match[2]} {match[4]}" for match in found] == expected


def test_hours_and_minutes():
    assert metrics._clock(7125) == "01:58:45"


def test_metrics_of_steps_that_are_taken_again_are_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    drop_lines_after(file, 3)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]


def test_every_interval_is_a_line(tmp_path):
    make_loop(steps=4, callbacks=[WriteMetrics(tmp_path, lambda: {"memory/host_gb": 1.5})], log_every=2).run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert all(line["memory/host_gb"] == 1.5 and "loss" in line for line in lines)
    assert list((tmp_path / "tensorboard").iterdir())
