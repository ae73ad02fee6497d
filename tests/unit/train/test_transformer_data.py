"""Which caches the data of a training are in."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from wandistiller.config.encode import EncodeConfig
from wandistiller.config.train import TrainConfig
from wandistiller.data.encode import fill_caches, run_encode
from wandistiller.data.encoded import encode_data
from wandistiller.errors import UsageError
from wandistiller.models.vae_tiles import encode_tiled
from wandistiller.train.optimisers import check_optimiser
from wandistiller.train.transformer_data import prepare_data, prepare_held_out

CPU = torch.device("cpu")


def add_picture(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((32, 32, 3), value, dtype=np.uint8)).save(path)
    path.with_suffix(".txt").write_text("a caption")


def test_held_out_data_leave_the_training_data_alone(tmp_path):
    """A folder of the training data has the very name and the very files of the held-out data."""
    add_picture(tmp_path / "train" / "held_out" / "a.png", 20)
    add_picture(tmp_path / "held" / "a.png", 230)
    config = TrainConfig(held_out=str(tmp_path / "held"), cache_dir=tmp_path / "cache", width=32, height=32, frames=(1,))
    training = prepare_data(config, "tiny-random", str(tmp_path / "train"), config.cache_dir, CPU)
    held_out = prepare_held_out(config, "tiny-random", CPU)
    assert not (tmp_path / "cache").exists()
    data, other = encode_data(training), encode_data(held_out)
    data.latents.check(data.source, data.buckets)
    assert not torch.equal(data.latents.read("held_out/a"), other.latents.read("a"))


def test_a_package_that_is_missing_is_noticed_before_anything_is_loaded(monkeypatch):
    check_optimiser("adamw")
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(UsageError, match="needs bitsandbytes"):
        check_optimiser("adamw8bit")


@pytest.mark.parametrize("vae_dtype", ["bfloat16", "auto"])
def test_latents_of_another_precision_are_used_where_that_is_asked_for(tmp_path, vae_dtype):
    add_picture(tmp_path / "train" / "a.png", 20)
    size = {"width": 32, "height": 32, "frames": (1,)}
    data = {"dataset_path": str(tmp_path / "train"), "cache_dir": tmp_path / "cache"}
    run_encode(EncodeConfig(model="tiny-random", vae_dtype="bfloat16", device="cpu", **data, **size))
    config = TrainConfig(vae_dtype=vae_dtype, **size)
    job = prepare_data(config, "tiny-random", data["dataset_path"], data["cache_dir"], CPU)
    assert fill_caches(job).num_latents == 0
    job = prepare_data(TrainConfig(**size), "tiny-random", data["dataset_path"], data["cache_dir"], CPU)
    assert fill_caches(job).num_latents == 1


def test_data_are_encoded_in_tiles_where_that_is_asked_for(tmp_path, monkeypatch):
    """Frames of 40x40 latents are cut; the latents are those of whole frames."""
    add_picture(tmp_path / "train" / "a.png", 20)
    found, tiles = [], []
    monkeypatch.setattr("wandistiller.data.encode.encode_tiled", lambda *args: tiles.append(1) or encode_tiled(*args))
    for is_tiled in (False, True):
        config = TrainConfig(vae_tiling=is_tiled, width=320, height=320, frames=(1,))
        data = encode_data(prepare_data(config, "tiny-random", str(tmp_path / "train"), tmp_path / f"cache-{is_tiled}", CPU))
        found.append(data.latents.read("a"))
        assert bool(tiles) is is_tiled
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)
