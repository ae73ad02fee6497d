"""Batches on their way to a device."""

import ctypes
import signal
import sys

import pytest
import torch
from helpers.toy_training import ToyReader

from wandistiller.data.batches import BatchPlan, MicroBatch, StepPlan
from wandistiller.data.loader import Batch, load_steps, read_batch


@pytest.mark.parametrize(("dtype", "moves"), [(torch.float64, False), (torch.float32, True)])
def test_what_apples_gpus_have_no_numbers_for_stays_on_the_host(monkeypatch, dtype, moves):
    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(device) or tensor)
    values = torch.rand(2, dtype=dtype)
    found = Batch({"place": values}, ("a", "b"), 0, 0).to(torch.device("mps"))
    assert found.tensors["place"] is values
    assert moved == [torch.device("mps")] * moves


def test_what_is_random_about_a_sample_depends_on_the_seed_and_the_epoch_alone():
    reader = ToyReader(4)

    def read(*indices, position=0, epoch=0, seed=7):
        return read_batch(reader, MicroBatch(position, epoch, indices), seed).tensors["inputs"]

    alone = read(2)
    assert torch.equal(read(0, 2, 1, position=5)[1:2], alone), "whoever it is with, and whenever it comes"
    for other in (read(2, epoch=1), read(2, seed=8)):
        assert not torch.allclose(other, alone)


class TellsItsEnd(ToyReader):
    """Samples that say which signal the process that reads them gets when its parent dies."""

    def read(self, index, generator):
        found = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(found))  # PR_GET_PDEATHSIG
        return {"signal": torch.tensor(found.value)}


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_workers_end_with_the_rank_that_they_read_for():
    """They have its connections as well: others would wait for a rank that is dead."""
    steps = load_steps(TellsItsEnd(), StepPlan(BatchPlan([0] * 10, 2, 0), 1, 1), start=0, rank=0, seed=0, workers=1)
    assert next(steps)[0].tensors["signal"].tolist() == [signal.SIGKILL] * 2
    steps.close()
