"""What all tests share: one tiny Wan of each kind, made once, and a cache of the tests' own."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # the suite runs in two processes on two cores


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # giving memory back looks at what tests have made, not at everything that was imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    _begin_with_the_same_chance()  # for what fixtures draw


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call():
    _begin_with_the_same_chance()  # whichever fixtures were made just now, or before


def _begin_with_the_same_chance():
    """Seed every generator: a test draws the same numbers alone, among others and in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return folder


@pytest.fixture(scope="session")
def tiny_size():
    from wandistiller.models.sizes import find_size

    return find_size("tiny")


@pytest.fixture(scope="session")
def tiny_folder(own_cache):
    """A tiny pipeline of random weights, the one that ``tiny-random`` stands for."""
    from wandistiller.models.tiny import random_tiny_folder

    return random_tiny_folder()


@pytest.fixture(scope="session")
def given_vae(tmp_path_factory, tiny_size):
    """Another VAE than the tiny pipeline's, of other statistics too: the model, its folder, and a file of original names."""
    from diffusers import AutoencoderKLWan

    from wandistiller.api import export

    channels, folder = tiny_size.vae["z_dim"], tmp_path_factory.mktemp("given")
    torch.manual_seed(11)
    vae = AutoencoderKLWan(**{**tiny_size.vae, "latents_mean": [0.25] * channels, "latents_std": [1.5] * channels})
    vae.save_pretrained(folder / "vae")
    export(model=str(folder / "vae"), output=folder / "vae.safetensors", format="original")
    return vae, {"diffusers": folder / "vae", "original": folder / "vae.safetensors"}


@pytest.fixture(scope="session")
def wide_vae(tmp_path_factory, tiny_size):
    """A VAE of more latent channels than the tiny transformer draws."""
    from diffusers import AutoencoderKLWan

    channels = tiny_size.vae["z_dim"] + 4
    statistics = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}
    folder = tmp_path_factory.mktemp("wide") / "vae"
    AutoencoderKLWan(**{**tiny_size.vae, "z_dim": channels, **statistics}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def random_box(tmp_path_factory):
    """A box with a pipeline of its size and random weights."""
    from wandistiller.models.sizes import find_size
    from wandistiller.models.tiny import write_random_pipeline

    folder = tmp_path_factory.mktemp("box")
    write_random_pipeline(folder / "pipeline", find_size("tiny-world"))
    return folder


@pytest.fixture
def some_box(request, monkeypatch):
    """A box in any case: the package's own, or one of random weights where it has none."""
    from wandistiller.models import box

    if not (box.BOX / "pipeline").is_dir():
        monkeypatch.setattr(box, "BOX", request.getfixturevalue("random_box"))
    return box.BOX


@pytest.fixture(scope="session")
def two_expert_folder(tmp_path_factory, tiny_size):
    """A pipeline of two experts, saved with the Euler scheduler."""
    from wandistiller.models.tiny import write_random_pipeline

    folder = tmp_path_factory.mktemp("two") / "pipeline"
    size = dataclasses.replace(tiny_size, boundary=0.875, guidance_2=3.0)
    write_random_pipeline(folder, size, seed=7, solver="euler")
    return folder
