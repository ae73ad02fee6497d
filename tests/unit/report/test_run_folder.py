import json

import pytest

from wandistiller.config.distill import DistillConfig
from wandistiller.config.toml_file import write_config
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.errors import UsageError
from wandistiller.report.figures import choose_charts
from wandistiller.report.run_folder import Metrics, read_run
from wandistiller.units import Bytes

DISTILLED = DistillConfig(teacher_path="tiny", data_path="world", batch_size=8)


@pytest.fixture
def run(tmp_path):
    write_config(tmp_path / "run.toml", DISTILLED, "distill")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 2.0, "loss": 0.5}\n{"step": 2, "time": 4.0, "loss"')
    return tmp_path


def test_a_complete_folder(run):
    found = read_run(run)
    assert (found.command, found.base, found.config.batch_size) == ("distill", "tiny", 8)
    # The line that was cut short is left out.
    assert found.metrics.over_steps("loss") == [(1, 0.5)]


def test_what_the_host_held_between_lines_of_metrics_counts(run):
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 2.0, "memory/host_gb": 2.0}\n')
    plan = {"device": "cpu", "predicted": {"in_use": 2_500_000_000}}
    (run / "plan.json").write_text(json.dumps(plan))
    assert read_run(run).memory_peaks == {"host": Bytes(2_000_000_000)}
    (run / "plan.json").write_text(json.dumps({**plan, "measured": {"bytes": 2_400_000_000}}))
    assert read_run(run).memory_peaks == {"host": Bytes(2_400_000_000)}
    assert read_run(run).predicted == {"host": Bytes(2_500_000_000)}


def remove(*names):
    def change(run):
        for name in names:
            (run / name).unlink()

    return change


def settings(config):
    return lambda run: write_config(run / "run.toml", config, config.command)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("run.toml"), "no run.toml"),
        (remove("model/model_index.json"), "--resume auto"),
        (remove("metrics.jsonl"), "no metrics.jsonl"),
        (settings(TrainVaeConfig()), "of a run of train-vae"),
        (settings(TrainConfig(lora_rank=4)), "LoRA"),
        (lambda run: (run / "run.toml").write_text("[distill"), "cannot be read"),
        (lambda run: (run / "run.toml").write_text("[distill]\nbatch_sice = 3"), "did you mean 'batch_size'"),
    ],
)
def test_what_is_missing_is_named(run, change, message):
    change(run)
    with pytest.raises(UsageError, match=message):
        read_run(run)


def test_no_folder(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        read_run(tmp_path / "none")


def test_minutes_go_on_where_a_run_was_resumed():
    metrics = Metrics([{"step": step, "time": time, "x": 1.0} for step, time in enumerate((30, 60, 90, 30, 60), start=1)])
    assert metrics.over_minutes("x") == [(0.5, 1), (1.0, 1), (1.5, 1), (2.0, 1), (2.5, 1)]
    assert metrics.minutes == 2.5


def test_peaks_of_host_and_devices():
    lines = [
        {"step": 1, "time": 1, "memory/host_gb": 2.0, "memory/cuda:0/peak_gb": 3.5, "memory/cuda:0/allocated_gb": 9.0},
        {"step": 2, "time": 2, "memory/host_gb": 1.0, "memory/cuda:0/peak_gb": 4.5},
    ]
    assert Metrics(lines).memory_peaks == {"host": Bytes(2 * 10**9), "cuda:0": Bytes(4_500_000_000)}


def test_each_kind_of_number_has_a_chart():
    line = {
        "step": 1,
        "time": 1,
        "loss": 1.0,
        "output_loss": 0.5,
        "held_out/loss": 2.0,
        "marks/overall": 0.5,
        "rate": 1e-4,
        "health/spread": 1.0,
        "seconds_per_step": 3.0,
        "student/gradient_norm": 1.0,
        "epoch": 0.1,
        "memory/host_gb": 1.0,
        "memory/page_locked_gb": 0.0,
        "memory/cuda:0/peak_gb": 2.0,
        "memory/cuda:0/peak_in_training_gb": 2.0,
        "memory/cuda:0/others_gb": None,
    }
    charts = {chart.title: [series.name for series in chart.series] for chart in choose_charts(Metrics([line]))}
    assert charts == {
        "Loss": ["loss", "output loss"],
        "Loss on held-out data": ["loss"],
        "The judge's marks on held-out captions": ["overall"],
        "Learning rate": ["rate"],
        "Gradient norm": ["student: gradient norm"],
        "Health: the student's latents against the teacher's": ["spread"],
        "Seconds a step": ["seconds per step"],
        "Memory of the host": ["host"],
        "Memory of cuda:0": ["peak"],
    }


def test_a_wide_loss_is_on_a_logarithmic_axis():
    lines = [{"step": step, "time": step, "loss": 10.0**-step, "output_loss": 0.1} for step in range(4)]
    (chart,) = choose_charts(Metrics(lines))
    assert chart.is_log
    (chart,) = choose_charts(Metrics([*lines, {"step": 5, "time": 5, "loss": 0.0}]))
    assert not chart.is_log
