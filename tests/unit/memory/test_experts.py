"""Which of two experts a timestep belongs to, and that one of them at most is in memory."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file

from wandistiller.memory.experts import Experts
from wandistiller.memory.subjects import choose_placement
from wandistiller.models.stored import TRANSFORMER, inspect_checkpoint

NAMES = ("transformer", "transformer_2")


@pytest.fixture
def experts(two_expert_folder):
    stored = [inspect_checkpoint(two_expert_folder / name, TRANSFORMER) for name in NAMES]
    on = {"device": torch.device("cpu"), "dtype": torch.float32, "placement": choose_placement("cpu", resident=0)}
    return Experts(stored, boundary=0.875, **on)


def test_much_noise_is_for_the_first_and_the_boundary_too(experts):
    """diffusers takes the first where ``t >= boundary_ratio * 1000``."""
    assert [experts.index_at(timestep) for timestep in (1000.0, 875.0, 874.9, 0.0)] == [0, 0, 1, 1]


def test_one_leaves_before_the_other_comes(experts, two_expert_folder):
    left = None
    for timestep, name in ((900.0, NAMES[0]), (100.0, NAMES[1]), (875.0, NAMES[0])):
        model = experts.at(timestep)
        gc.collect()
        assert left is None or left() is None, "the one before is gone"
        weights = load_file(next((two_expert_folder / name).glob("*.safetensors")))
        torch.testing.assert_close(model.get_parameter("proj_out.weight"), weights["proj_out.weight"])
        left = weakref.ref(model)
        del model
    experts.release()
    gc.collect()
    assert left() is None
