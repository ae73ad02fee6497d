"""Batches on their way to a device."""

import pytest
import torch

from wandistiller.data.loader import Batch


@pytest.mark.parametrize(("dtype", "moves"), [(torch.float64, False), (torch.float32, True)])
def test_what_apples_gpus_have_no_numbers_for_stays_on_the_host(monkeypatch, dtype, moves):
    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(device) or tensor)
    values = torch.rand(2, dtype=dtype)
    found = Batch({"place": values}, ("a", "b"), 0, 0).to(torch.device("mps"))
    assert found.tensors["place"] is values
    assert moved == [torch.device("mps")] * moves
