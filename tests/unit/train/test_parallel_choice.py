"""Ranks that are not told how to train together: the whole model where it fits, else slices."""

import pytest
import torch

from wandistiller.config.train import TrainConfig
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.works import Training
from wandistiller.models.shapes import Shapes
from wandistiller.models.sizes import SIZES
from wandistiller.train import parallel_choice
from wandistiller.train.prediction import planned_pixels, train_work
from wandistiller.units import Bytes

SIZE = SIZES["wan2.1-1.3b"]
WHOLE = 20 * 1_418_996_800
"""Weights, gradients as they are and as they are exchanged, two moments: in float32."""


@pytest.fixture
def settle(monkeypatch):
    def go(memory, nodes=1, **options):
        environment = {"RANK": "0", "WORLD_SIZE": str(4 * nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
        for name, value in {**environment, "TORCHELASTIC_RUN_ID": "test"}.items():
            monkeypatch.setenv(name, value)
        hardware = Hardware(card=None, num_cards=4, num_nodes=nodes, host_memory=Bytes(memory))
        monkeypatch.setattr(parallel_choice, "_hardware", lambda device: hardware)
        shapes = Shapes.of(SIZE.vae, SIZE.transformer)
        small = {"width": 64, "height": 64, "frames": (1,)}
        config = TrainConfig(model="tiny", dataset_path="world:9:1x64x64", **small, **options)

        def work(changed, machine):
            return train_work(changed, shapes, machine, planned_pixels(changed, shapes.vae))

        return parallel_choice.settle_parallel(config, torch.device("cpu"), work).name

    return go


def test_the_whole_model_where_it_fits(settle):
    assert settle(1.3 * WHOLE) == "ddp"


def test_slices_where_it_does_not(settle):
    assert settle(0.8 * WHOLE) == "fsdp"


def test_slices_within_a_machine_before_slices_over_all(settle):
    assert settle(0.8 * WHOLE, nodes=2) == "hsdp"
    assert settle(0.25 * WHOLE, nodes=2) == "fsdp"


def test_what_slices_do_not_go_with(settle):
    assert settle(0.1 * WHOLE, optimizer="adafactor") == "ddp"


def test_what_cannot_be_foreseen_is_trained_all_the_same(settle, monkeypatch, capsys):
    monkeypatch.setattr(Training, "phase", lambda *_: 1 / 0)
    assert settle(10 * WHOLE) == "ddp"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_was_asked_for_stays(settle):
    assert settle(10 * WHOLE, parallel="fsdp") == "fsdp"
