"""Blocks straight from the user's files: what memory has, without a second copy, and disks that fail."""

import errno
import os
import shutil

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.streaming import LateLane, run
from torch import nn

from wandistiller.api import export
from wandistiller.errors import CheckpointError, UsageError
from wandistiller.memory.lanes import ImmediateLane
from wandistiller.memory.stored_state import changing_state
from wandistiller.memory.streaming import stream_blocks
from wandistiller.models.load import load_model
from wandistiller.models.stored import build_empty, inspect_checkpoint
from wandistiller.train.ema import MovingAverage
from wandistiller.train.method import Role


def from_files(stored, dtype=None, **options):
    """Return a model whose blocks come from a checkpoint's files as they are needed, and its stream."""
    model = build_empty(stored.architecture, stored.config, dtype=dtype)
    read, locate = (lambda key: stored.read_for(key, dtype)), (lambda key: stored.locate(key, dtype))
    return model, stream_blocks(model, list(model.blocks), "cpu", read=read, locate=locate, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dialect", ["diffusers", "comfyui"])
@pytest.mark.parametrize("lane", [ImmediateLane, LateLane])
def test_blocks_straight_from_the_users_files(tiny_folder, tmp_path, inputs, dtype, dialect, lane):
    """In place where the file has them as they are used, converted where not; host memory for a few blocks alone."""
    path = tiny_folder / "transformer"
    if dialect == "comfyui":
        export(model=str(path), output=tmp_path / "t.safetensors", format="comfyui", dtype="bfloat16")
        path = tmp_path / "t.safetensors"
    stored = inspect_checkpoint(path)
    inputs = tuple(tensor.to(dtype) for tensor in inputs)
    expected = run(load_model(stored, dtype=dtype), inputs)
    model, stream = from_files(stored, dtype, lane=lane())
    for _ in range(4):
        assert torch.equal(run(model, inputs), expected)
    assert stream.store.host_bytes == 4 * max(layout.num_bytes for layout in stream.layouts)
    stream.detach()
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("resident", [0, 1, 2])
def test_what_is_in_a_slot_already_takes_no_buffer_from_what_is_read_ahead(tiny_folder, tmp_path, inputs, resident):
    """No read is given up for another one, and each block is read once a pass."""
    torch.manual_seed(0)
    config = {**dict(load_model(inspect_checkpoint(tiny_folder / "transformer")).config), "num_layers": 12}
    WanTransformer3DModel.from_config(config).save_pretrained(tmp_path)
    model, stream = from_files(inspect_checkpoint(tmp_path), resident=resident)
    begin, reads, forced = stream.store._begin, [], []
    pieces = stream.store._pieces
    stream.store._pieces = lambda index, flat: reads.append(index) or pieces(index, flat)
    stream.store._begin = lambda index, *, must=False: forced.extend([index] * must) or begin(index, must=must)
    run(model, inputs)
    reads.clear(), forced.clear()
    for _ in range(4):
        run(model, inputs)
    assert not forced and len(reads) == 4 * (12 - resident)


def test_a_file_that_shrinks_while_it_is_streamed_is_named(tiny_folder, tmp_path, inputs):
    shutil.copytree(tiny_folder / "transformer", tmp_path / "t")
    stored = inspect_checkpoint(tmp_path / "t")
    model, _ = from_files(stored)
    file = tmp_path / "t" / "diffusion_pytorch_model.safetensors"
    os.truncate(file, file.stat().st_size // 3)
    with pytest.raises(CheckpointError, match="ends inside tensor"):
        run(model, inputs)


def test_a_disk_that_fails_once_is_asked_again(tiny_folder, inputs, monkeypatch):
    stored = inspect_checkpoint(tiny_folder / "transformer")
    expected = run(load_model(stored), inputs)
    model, _ = from_files(stored)
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "stale file handle")))
        with pytest.raises(OSError, match="stale"):
            run(model, inputs)
    for _ in range(2):
        assert torch.equal(run(model, inputs), expected)


def test_blocks_on_disk_are_not_trained(model):
    with pytest.raises(UsageError, match="read, not trained"):
        stream_blocks(model, list(model.blocks), "cpu", read=lambda key: None, locate=lambda key: None, train=True)


def test_what_training_changes_is_known_without_reading_the_rest(tiny_folder, monkeypatch):
    """Saving and averaging adapters would else read the whole model each time."""
    model, stream = from_files(inspect_checkpoint(tiny_folder / "transformer"))
    model.requires_grad_(False)
    adapter = model.blocks[0].attn1.to_q.adapter = nn.Linear(2, 2)
    whole = set(model.state_dict())
    monkeypatch.setattr(stream.store, "views", lambda position: pytest.fail("a block was read"))
    role = Role("student", model, is_trained=True)
    assert set(role.saved_names) == {f"blocks.0.attn1.to_q.adapter.{name}" for name in ("weight", "bias")}
    average = MovingAverage(model, role.saved_names, 0.5)
    average.update(10)
    found = changing_state(model)
    assert found["blocks.0.attn1.to_q.adapter.weight"].data_ptr() == adapter.weight.data_ptr()
    assert {name for name in whole - found.keys() if not name.startswith("blocks.")} == set(), "the rest is on the device"
    assert not any(name.endswith("ffn.net.0.proj.weight") for name in found)
