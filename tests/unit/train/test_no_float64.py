"""What is measured on a device without float64, such as Apple's GPUs, is added up in float64 on the host."""

from types import SimpleNamespace

import pytest
import torch

from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.train import vae_run
from wandistiller.train.held_out import QUANTILES, MeasureHeldOut


class OnDevice:
    """A tensor there: it can only leave."""

    def __init__(self, values):
        self._values = values

    def cpu(self):
        return self._values

    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")


def test_held_out_errors():
    samples = SimpleNamespace(latents=lambda index: torch.zeros(1, 1, 2, 2), text=lambda index: torch.zeros(3, 4))
    method = SimpleNamespace(held_out_errors=lambda tensors: OnDevice(tensors["sigma"]))
    measure = MeasureHeldOut.__new__(MeasureHeldOut)
    measure._samples, measure._method, measure._sigma = samples, method, SigmaDistribution(shape="uniform")
    measure._at_once = 2
    loop = SimpleNamespace(device=torch.device("cpu"), options=SimpleNamespace(precision="no"))
    assert measure._errors(loop, 0).tolist() == pytest.approx(QUANTILES)


def test_the_statistics_of_latents(monkeypatch):
    mean, logvar = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1, 1), torch.tensor([0.0, 1.0]).view(1, 2, 1, 1, 1)
    monkeypatch.setattr(vae_run, "encode_distribution", lambda vae, pixels: (OnDevice(mean), OnDevice(logvar)))
    found = vae_run.measure_latents(SimpleNamespace(config={"z_dim": 2}), Samples(), 5, torch.device("cpu"))
    assert found[0] == [1.0, 3.0]
    assert found[1] == pytest.approx([1.0, torch.e**0.5])


class Samples:
    def __len__(self):
        return 1

    def pixels(self, index):
        return torch.zeros(3, 1, 8, 8)
