"""Batches on their way to a device."""

import ctypes
import signal
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from helpers.toy_training import ToyReader

from wandistiller.data.batches import BatchPlan, MicroBatch, StepPlan
from wandistiller.data.buckets import AllOne, Bucket
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


def batches_one_by_one(buckets, size, seed, epoch):
    """Each bucket's batch when it is full, then those that are not."""
    waiting = {}
    for index in np.random.default_rng((seed, epoch)).permutation(len(buckets)).tolist():
        queue = waiting.setdefault(buckets[index], [])
        queue.append(index)
        if len(queue) == size:
            yield tuple(queue)
            queue.clear()
    yield from (tuple(queue) for queue in waiting.values() if queue)


@pytest.mark.parametrize("num_buckets", [1, 2, 5])
def test_batches_come_when_they_are_full(num_buckets):
    for count, size in ((1, 3), (17, 3), (18, 3), (40, 7)):
        buckets = np.random.default_rng(count).integers(num_buckets, size=count).tolist()
        plan = BatchPlan(buckets, size, seed=4)
        done = 0
        for position, expected in enumerate(batches_one_by_one(buckets, size, 4, 1), plan.batches_per_epoch):
            assert plan[position] == MicroBatch(position, 1, expected)
            assert plan.place(position) == (1, done)
            assert plan.position_at(1, done) == plan.position_at(1, done + len(expected) - 1) == position
            done += len(expected)
        assert done == count and position + 1 == 2 * plan.batches_per_epoch


def test_batches_of_very_many_samples_take_little_room():
    """Two arrays of whole numbers at most: 16 bytes a sample, and as many again while they are made."""
    tracemalloc.start()
    plan = BatchPlan(AllOne(Bucket(1, 32, 32), 10**6), 4, seed=0)
    assert len(plan[0].indices) == 4
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * 10**6


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
