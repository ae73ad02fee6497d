"""What limits a step is the part of a machine that would shorten it most."""

from dataclasses import dataclass, replace

import pytest

from wandistiller.memory.estimates import Phase
from wandistiller.memory.hardware import H200, Hardware
from wandistiller.memory.stage import Placing
from wandistiller.memory.step_limit import limit_of
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.sizes import SIZES
from wandistiller.units import Bytes

MACHINE = Hardware(card=H200, host_memory=Bytes(2**37), bus_rate=50e9, disk_rate=2e9)
LIMITS = ["the card", "the host, which launches kernels", "the bus", "the disk", "updates in host memory", "the CPU"]
IMAGE, VIDEO = (1, 44, 80), (31, 44, 80)


def passes(shape, batch=1, **placing):
    config = dict(SIZES["wan2.2-5b"].transformer)
    use = Use(name="student", config=config, latent_shape=(48, *shape), batch_size=batch)
    return Passes(use=use, placing=Placing(**placing))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (passes(VIDEO), "the card"),
        (passes(IMAGE), "the host, which launches kernels"),
        (passes(IMAGE, name="offload"), "the bus"),
        (passes(VIDEO, name="offload"), "the card"),
        (passes(IMAGE, name="disk"), "the disk"),
        (passes(IMAGE, name="balanced", max_memory={0: 2 * 2**30, "cpu": 2**36}), "the bus"),
        (passes(IMAGE, name="cpu"), "the CPU"),
        (passes(IMAGE, batch=16), "the card"),
    ],
)
def test_a_pass_waits_for_one_part_of_the_machine(work, expected):
    assert limit_of(Phase(name="denoising", seconds=work.seconds(MACHINE), num_steps=50, work=work), MACHINE) == expected


@pytest.mark.parametrize("is_measured", [False, True])
def test_updates_of_offloaded_weights_and_the_exchange_of_ranks_are_limits(is_measured, monkeypatch):
    """What is measured here is measured where it is asked for: for updates in host memory alone."""
    monkeypatch.setattr("wandistiller.memory.rates.update_rate", lambda: 20e9)
    config = dict(SIZES["wan2.2-5b"].transformer)
    student = Use(name="student", config=config, latent_shape=(48, *IMAGE), trains="everything")
    works = {
        "updates in host memory": (
            Training(student=student, placing=Placing(name="offload")),
            replace(MACHINE, host_rate=None if is_measured else 20e9),
        ),
        "what ranks send each other": (Training(student=student), replace(MACHINE, num_nodes=2, network_rate=1e9)),
    }
    for expected, (work, machine) in works.items():
        phase = Phase(name="training", seconds=work.seconds(machine), num_steps=1, work=work)
        assert limit_of(phase, machine) == expected


def test_only_who_updates_in_host_memory_waits_until_that_is_measured(monkeypatch):
    monkeypatch.setattr("wandistiller.memory.rates.update_rate", lambda: pytest.fail("measured for nothing"))
    machine, work = replace(MACHINE, host_rate=None), passes(IMAGE, name="offload")
    phase = Phase(name="denoising", seconds=work.seconds(machine), num_steps=50, work=work)
    assert limit_of(phase, machine) == "the bus"


def test_two_parts_that_are_as_slow_limit_a_step_together():
    work = passes(IMAGE, name="disk")
    machine = replace(MACHINE, disk_rate=MACHINE.bus_rate)
    assert limit_of(Phase(name="denoising", seconds=1.0, num_steps=50, work=work), machine) == "the bus and the disk"


def test_a_step_for_several_prompts_has_the_limit_of_one():
    work = passes(IMAGE)
    phases = [Phase(name="denoising", seconds=count * work.seconds(MACHINE), num_steps=50, work=work) for count in (1, 8)]
    assert [limit_of(phase, MACHINE) for phase in phases] == ["the host, which launches kernels"] * 2


@dataclass(frozen=True)
class Split:
    """Work of which every part of a machine does a share, one after the other."""

    shares: dict[str, float]

    def seconds(self, hardware):
        rates = {
            "the card": hardware.card.bandwidth / H200.bandwidth,
            "the host, which launches kernels": H200.launch_seconds / hardware.card.launch_seconds,
            "the bus": hardware.bus_rate / MACHINE.bus_rate,
            "the disk": hardware.disk_rate / MACHINE.disk_rate,
            "updates in host memory": hardware.update_rate / MACHINE.update_rate,
            "the CPU": hardware.host_flops / MACHINE.host_flops,
        }
        return sum(share / rates[name] for name, share in self.shares.items())


@pytest.mark.parametrize("largest", LIMITS)
def test_the_largest_share_is_the_limit(largest):
    work = Split({name: 0.3 if name == largest else 0.14 for name in LIMITS})
    assert limit_of(Phase(name="any", seconds=1.0, num_steps=1, work=work), MACHINE) == largest


@pytest.mark.parametrize(
    ("changes", "machine"),
    [
        ({"num_steps": 0}, MACHINE),
        ({"work": None}, MACHINE),
        ({"seconds": float("inf")}, MACHINE),
        ({"work": Split(dict.fromkeys(LIMITS, 0.0))}, MACHINE),
    ],
    ids=["done once", "of no work", "not worked out", "of nothing"],
)
def test_some_phases_have_no_limit(changes, machine):
    options = {"name": "any", "seconds": 1.0, "num_steps": 1, "work": Split({"the card": 1.0})} | changes
    assert limit_of(Phase(**options), machine) is None
