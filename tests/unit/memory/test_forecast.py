"""What a run says beforehand and at its end, and that a prediction that fails costs nobody a run."""

import json

import torch

from wandistiller.memory.estimates import Item, Phase
from wandistiller.memory.forecast import Forecast, forecast
from wandistiller.memory.hardware import described
from wandistiller.memory.monitor import DeviceMemory, Monitor
from wandistiller.units import Bytes

CARD = torch.device("cuda", 0)
PHASE = Phase(
    name="training",
    items=(Item("student", "weights", "device", Bytes(2**30)), Item("student", "weights", "page-locked", Bytes(2**32))),
    peak=Bytes(3 * 2**30),
    reserved=Bytes(4 * 2**30),
    seconds=1.5,
)


def monitor_of(reserved):
    monitor = Monitor([])
    zero = Bytes(0)
    for phase, size in (("loading", 9), ("training", reserved)):
        monitor.peaks[(phase, "cuda:0")] = DeviceMemory(zero, zero, zero, Bytes(size * 2**30), zero, zero)
    return monitor


def test_both_are_told_and_kept(tmp_path):
    told = Forecast(PHASE, CARD, Bytes(0))
    assert told.line() == "Predicted: at most 4.0 GiB on cuda:0 (weights 1.0 GiB), 1.5 s a step"
    on_host = Forecast(PHASE, torch.device("cpu"), Bytes(2**30))
    assert on_host.line() == "Predicted: about 4.0 GiB on cpu (weights 1.0 GiB)"
    assert told.outcome(monitor_of(5), 2.0) == "Measured: 5.0 GiB on cuda:0, 2 s a step; predicted were 4.0 GiB and 1.5 s"
    told.save(tmp_path, monitor_of(5), 2.0)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["predicted"]["bytes"] == 4 * 2**30 and found["predicted"]["in_use"] == 3 * 2**30
    assert found["measured"] == {"bytes": 5 * 2**30, "seconds_per_step": 2.0}


def test_the_disk_of_files_that_are_read_in_every_step_is_measured(tmp_path, monkeypatch):
    read, machines = [], []
    files = [tmp_path / name for name in ("small", "large")]
    for file, size in zip(files, (1, 2), strict=True):
        file.write_bytes(bytes(size))
    monkeypatch.setattr("wandistiller.memory.raw_reads.read_rate", lambda files: read.extend(files) or 7e9)
    monkeypatch.setattr("wandistiller.memory.forecast.hardware_of", lambda device: described(card="h200"))
    for streamed in ((), files):
        assert forecast(lambda hardware: machines.append(hardware) or PHASE, CARD, files=streamed) is not None
    assert [machine.disk_rate for machine in machines] == [2e9, 7e9] and read == files[1:]


def test_a_prediction_that_fails_is_said_and_nothing_more(capsys):
    def fail(hardware):
        raise ValueError("no such shape")

    assert forecast(fail, torch.device("cpu")) is None
    assert "no such shape" in capsys.readouterr().err
