"""A model of a few blocks, and something to ask it."""

import pytest
import torch
from diffusers import WanTransformer3DModel


@pytest.fixture
def model(tiny_size):
    torch.manual_seed(0)
    return WanTransformer3DModel(**{**tiny_size.transformer, "num_layers": 5}).eval()


@pytest.fixture
def inputs(tiny_size):
    torch.manual_seed(1)
    channels, width = tiny_size.transformer["in_channels"], tiny_size.transformer["text_dim"]
    return torch.randn(1, channels, 1, 8, 8), torch.tensor([300.0]), torch.randn(1, 4, width)
