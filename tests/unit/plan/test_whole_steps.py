"""What is foreseen of trainings, against their steps played through whole."""

import pytest
import torch
from helpers.whole_steps import whole_steps

from wandistiller.memory.hardware import H200, Hardware
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Adapters, Use
from wandistiller.memory.works import Training
from wandistiller.models.sizes import SIZES
from wandistiller.units import Bytes

HARDWARE = Hardware(card=H200, host_memory=Bytes(2**40))
OFFLOAD = Placing(name="offload")
SHORT = {"dtype": torch.bfloat16, "precision": "no"}


def use(size="wan2.1-1.3b", layers=9, shape=(1, 30, 52), name="student", **changes):
    config = {**SIZES[size].transformer, "num_layers": layers}
    return Use(name=name, config=config, latent_shape=(config["in_channels"], *shape), text_tokens=64, **changes)


def trained(**changes):
    return use(**{"trains": "everything", "dtype": torch.float32, "precision": "bf16", **changes})


LARGE = use("wan2.1-14b", layers=8, shape=(1, 60, 104), name="teacher")
WORKS = {
    "plain": Training(student=trained(batch_size=2)),
    "averaged, to host": Training(student=trained(policy="selective", to_host=True, shape=(5, 30, 52)), averages=True),
    "recomputed, added up": Training(student=trained(policy="full", precision="no", shape=(1, 4, 4)), accumulation=2),
    "masters": Training(student=trained(**SHORT, policy="full"), averages=True),
    "at random": Training(student=trained(**SHORT, policy="full"), optimiser=OptimiserChoice("adamw", "stochastic")),
    "adafactor": Training(student=trained(policy="full"), optimiser=OptimiserChoice("adafactor")),
    "adafactor, masters": Training(student=trained(**SHORT, policy="full"), optimiser=OptimiserChoice("adafactor")),
    "adapters, some resident": Training(
        student=use(trains="adapters", adapters=Adapters(16, ("to_q", "to_v"))), placing=Placing(name="offload", resident=3)
    ),
    "offloaded": Training(student=trained(**SHORT, layers=11), placing=OFFLOAD),
    "offloaded, added up": Training(student=trained(**SHORT, layers=11, policy="full"), placing=OFFLOAD, accumulation=2),
    "offloaded, some resident": Training(
        student=trained(**SHORT, layers=11, policy="full"), placing=Placing(name="offload", resident=3)
    ),
    "taught by a larger one": Training(
        student=trained(shape=(1, 60, 104), policy="full"), teacher=LARGE, teacher_placing=OFFLOAD, accumulation=2
    ),
    "guided": Training(
        student=trained(shape=(1, 60, 104), policy="full", to_host=True), teacher=LARGE, teacher_passes=2, accumulation=2
    ),
    "features of a larger one": Training(
        student=trained(shape=(1, 60, 104), policy="selective"),
        teacher=LARGE,
        teacher_placing=Placing(name="offload", resident=2),
        matches_features=True,
    ),
    "features, guided": Training(
        student=trained(policy="full", layers=3),
        teacher=LARGE.changed(latent_shape=(16, 1, 30, 52)),
        teacher_placing=OFFLOAD,
        teacher_passes=2,
        matches_features=True,
    ),
    "one block, added up": Training(student=trained(**SHORT, policy="full", layers=1), placing=OFFLOAD, accumulation=2),
    "features of one as wide": Training(
        student=trained(policy="full", batch_size=8),
        teacher=use(layers=12, batch_size=8, name="teacher"),
        matches_features=True,
    ),
    "a larger one in float16": Training(
        student=trained(shape=(1, 60, 104), layers=2, policy="full", precision="fp16"), teacher=LARGE
    ),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_training_takes_what_is_foreseen(name, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    phase = WORKS[name].phase(HARDWARE)
    found = whole_steps(WORKS[name], monkeypatch)
    assert phase.peak == pytest.approx(found.peak, rel=0.01)
    assert phase.reserved == pytest.approx(found.reserved, rel=0.01)
