"""The doctor finds what is broken."""

import pytest
import torch

from wandistiller import doctor
from wandistiller.api import doctor as run


def test_a_broken_step_is_named_and_the_exit_code_tells(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image is available\nsecond line")

    monkeypatch.setattr(doctor, "_gradient", broken)
    diagnosis = run(device="cpu", disk_megabytes=0)
    assert diagnosis.exit_code == 1
    assert "cpu bfloat16 backward: RuntimeError: no kernel image is available" in diagnosis.broken
    assert "BROKEN" in capsys.readouterr().out


def test_wrong_gradients_are_found(monkeypatch):
    results = iter([torch.zeros(3), torch.ones(3)] * 3)
    monkeypatch.setattr(doctor, "_gradient", lambda *_: next(results))
    diagnosis = run(device="cpu", disk_megabytes=0, json=True)
    assert all("gradients differ" in line for line in diagnosis.broken)
    assert len(diagnosis.broken) == 3


def test_numbers_that_are_not_finite_are_found():
    with pytest.raises(RuntimeError, match="finite"):
        doctor._require_finite(torch.tensor([1.0, float("nan")]))


def test_the_kernel_is_the_one_that_runs():
    mask = torch.zeros(64, 64, requires_grad=True)
    with doctor._KernelName() as used:
        query = torch.randn(1, 2, 64, 128)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    assert used.name == "math"  # a mask with a gradient takes the plain way
    assert doctor._attention_kernel(torch.device("cpu"), torch.float32) == "flash"


def test_a_full_disk_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    assert any("too little room" in line for line in run(device="cpu", disk=tmp_path).broken)


def test_whatever_breaks_is_a_finding(monkeypatch):
    def broken(*args):
        raise RuntimeError("it is on fire")

    for probe in ("device_memory", "_attention_kernel", "_measure_disk"):
        monkeypatch.setattr(doctor, probe, broken)
    found = run(device="cpu").broken
    for where in ("cpu memory:", "cpu float32 attention:", "disk "):
        assert any(line.startswith(where) and "on fire" in line for line in found)


def test_a_file_in_the_systems_cache_is_not_called_cold(tmp_path):
    file = tmp_path / "x"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened:
        opened.read()
        assert doctor._is_cached(opened.fileno(), 4096)
