"""What a run leaves in its files and on the screen."""

import json
import re

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
