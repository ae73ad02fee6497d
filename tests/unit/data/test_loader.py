"""Batches on their way to a device."""

import pytest
import torch
from helpers.toy_training import ToyReader

from wandistiller.data.batches import MicroBatch
from wandistiller.data.loader import Batch, read_batch


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
