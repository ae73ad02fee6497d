"""Loading: how much host memory it takes, and where it puts things."""

import subprocess
import sys

import pytest
import torch
from diffusers import WanTransformer3DModel

from wandistiller.models.load import load_transformer
from wandistiller.models.sizes import SIZES
from wandistiller.models.weight_files import Planned, write_safetensors

# 2.1 GB in float32: eight blocks of a width that a 1.3B has.
LARGE = {**SIZES["wan2.1-1.3b"].transformer, "num_attention_heads": 16, "ffn_dim": 8192, "num_layers": 7}

MEASURE = """
import resource, sys, torch
from pathlib import Path
from wandistiller.models.load import load_transformer
torch.ones(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model = load_transformer(Path(sys.argv[1]), dtype=getattr(torch, sys.argv[2]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(peak - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in WanTransformer3DModel(**LARGE).state_dict().items()}
    path = folder / "model.safetensors"
    # A file of holes would cost no memory to read; these bytes are real.
    planned = [Planned(key, torch.float32, shape, lambda shape=shape: torch.full(shape, 0.5)) for key, shape in shapes.items()]
    write_safetensors(path, planned)
    assert path.stat().st_size > 2e9
    yield path
    path.unlink()


def measure(checkpoint, dtype):
    """Return the growth of the peak of resident memory in a process that loads, and the bytes of the loaded model."""
    command = [sys.executable, "-c", MEASURE, str(checkpoint), dtype]
    peak, size = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    return peak, size


@pytest.mark.xdist_group("large")
def test_host_memory_never_holds_the_model_twice(large_checkpoint):
    peak, size = measure(large_checkpoint, "float32")
    assert size > 2e9
    assert peak <= 1.1 * size


@pytest.mark.xdist_group("large")
def test_a_conversion_costs_one_tensor_more_than_the_model(large_checkpoint):
    peak, size = measure(large_checkpoint, "bfloat16")
    assert 1e9 < size < 1.1e9
    largest = 4 * LARGE["ffn_dim"] * LARGE["num_attention_heads"] * LARGE["attention_head_dim"]
    # The stored tensor, beside the model so far with its converted copy; the rest is the interpreter's.
    assert peak <= size + largest + 50e6


def test_every_tensor_is_reported(tiny_folder):
    seen = []
    model = load_transformer(tiny_folder / "transformer", on_tensor=lambda name, size: seen.append((name, size)))
    assert [name for name, _ in seen] == list(dict(model.named_parameters()))
    assert sum(size for _, size in seen) == sum(parameter.nbytes for parameter in model.parameters())


def test_nothing_is_left_on_the_meta_device_and_nothing_is_trained(tiny_folder):
    model = load_transformer(tiny_folder / "transformer")
    assert all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_only_the_named_device_is_touched(tiny_folder):
    """On the meta device nothing is allocated: the loader has to ask for each tensor there and nowhere else."""
    model = load_transformer(tiny_folder / "transformer", device="meta")
    assert all(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers()))
