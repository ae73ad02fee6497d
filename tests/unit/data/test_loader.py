import pytest
import torch

from wandistiller.data.loader import Batch


def test_float64_stays_on_the_host_where_the_device_has_none():
    place = torch.rand(2, dtype=torch.float64)
    moved = Batch({"place": place}, ("a", "b"), 0, 0).to(torch.device("mps"))
    assert torch.equal(moved.tensors["place"], place)
    if not torch.backends.mps.is_available():
        with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
            Batch({"x": place.float()}, ("a", "b"), 0, 0).to(torch.device("mps"))
