"""Ways: what the user leaves open is searched, what the program would refuse is not, and what costs accuracy is named."""

from pathlib import Path

import pytest

from wandistiller.cli.main import parse
from wandistiller.config.sample import SampleConfig
from wandistiller.memory.hardware import described
from wandistiller.plan.candidates import all_ways, is_left_to_the_program
from wandistiller.units import Bytes

CARD = described(card="rtx4090", host_memory=Bytes(2**36))
CARDS = described(card="rtx4090", num_cards=8, host_memory=Bytes(2**38))
TRAIN = ["train", "--model", "wan2.1-1.3b"]
DISTILL = ["distill", "--teacher-path", "wan2.1-1.3b"]


def values(flags, name, hardware=CARD):
    request = parse("plan", flags)
    ways = all_ways(request.job, request.given, hardware)
    return {way.changes.get(name, getattr(request.job, name)) for way in ways}


@pytest.mark.parametrize(
    ("flags", "name", "searched"),
    [
        (["sample", "--model", "wan2.1-14b", "--placement", "auto"], "placement", {"gpu", "offload", "disk", "cpu"}),
        (["sample", "--model", "wan2.1-14b", "--placement", "cpu"], "placement", {"cpu"}),
        ([*TRAIN, "--lora-rank", "4", "--placement", "auto"], "placement", {"gpu", "offload", "disk", "cpu"}),
        ([*DISTILL, "--preset", "one-48gb"], "teacher_device_strategy", {"gpu", "offload", "disk", "cpu"}),
        ([*DISTILL, "--teacher-device-strategy", "auto"], "teacher_device_strategy", {"gpu", "offload", "disk", "cpu"}),
        ([*DISTILL, "--teacher-on-cpu"], "teacher_device_strategy", {"auto"}),
        (DISTILL, "optimizer", {"adamw", "adamw8bit", "adafactor"}),
        ([*DISTILL, "--optimizer", "adafactor"], "optimizer", {"adafactor"}),
        (TRAIN, "vae_gradient_checkpointing", {False}),
        ([*TRAIN, "--pixel-loss-weight", "0.1"], "vae_gradient_checkpointing", {False, True}),
        ([*TRAIN, "--pixel-loss-weight", "0.1", "--vae-gradient-checkpointing"], "vae_gradient_checkpointing", {True}),
        ([*TRAIN, "--batch-size", "8"], "batch_size", {8, 4, 2, 1}),
        ([*TRAIN, "--batch-size", "8", "--gradient-accumulation", "1"], "batch_size", {8}),
    ],
)
def test_what_is_open_is_searched(flags, name, searched):
    assert values(flags, name) == searched


POLICY_FLAGS = [
    [],
    ["--activation-policy", "full"],
    ["--activation-policy", "selective", "--activations-to-host"],
    ["--activation-policy", "none", "--activations-to-host"],
    ["--activations-to-host"],
]


@pytest.mark.parametrize("policy", POLICY_FLAGS)
@pytest.mark.parametrize(
    "flags",
    [
        TRAIN,
        [*TRAIN, "--pixel-loss-weight", "0.1"],
        [*TRAIN, "--pixel-loss-weight", "0.1", "--no-vae-gradient-checkpointing"],
        [*TRAIN, "--pixel-loss-weight", "0.1", "--vae-gradient-checkpointing", "--lora-rank", "8"],
        [*TRAIN, "--batch-size", "3", "--optimizer", "adafactor", "--placement", "gpu"],
        [*DISTILL, "--teacher-device-strategy", "cpu"],
    ],
)
def test_what_was_asked_for_is_tried(flags, policy):
    request = parse("plan", [*flags, *policy])
    assert any(
        is_left_to_the_program(request.job, way.changes, request.given) for way in all_ways(request.job, request.given, CARD)
    )


def test_a_sample_without_pixels_has_no_ways_to_decode():
    flags = ["sample", "--model", "wan2.1-1.3b", "--prompt", "x"]
    assert values([*flags, "--output", "a.safetensors"], "vae_dtype") == {"float32"}
    assert len(values([*flags, "--output", "a.png"], "vae_dtype")) > 1


def test_a_vae_that_must_not_be_recomputed_takes_no_policy_away():
    flags = [*TRAIN, "--pixel-loss-weight", "0.1"]
    plain = [*flags, "--no-vae-gradient-checkpointing"]
    assert values(plain, "activation_policy") == values(flags, "activation_policy") == {"none", "selective", "full"}
    assert values(plain, "activations_to_host") == {False, True}


def test_ranks_search_slices_and_nothing_that_they_would_refuse():
    assert values(TRAIN, "placement", CARDS) == {"gpu"}
    assert values(TRAIN, "parallel", CARDS) == {"ddp", "fsdp"}
    assert values([*TRAIN, "--parallel", "auto"], "parallel", CARDS) == {"ddp", "fsdp"}
    assert "sharded" in values(DISTILL, "teacher_device_strategy", CARDS)


def test_nothing_is_streamed_where_there_is_no_card():
    cpu = described(num_cards=0, host_memory=Bytes(2**36))
    assert values(["sample", "--model", "wan2.1-1.3b"], "placement", cpu) == {"auto"}
    assert values(DISTILL, "teacher_device_strategy", cpu) == {"auto"}


def test_costs_in_accuracy_are_named():
    job = SampleConfig(model="wan2.1-14b", prompt=("a",), output=Path("a.png"))
    ways = {tuple(sorted(way.changes.items())): way for way in all_ways(job, frozenset(), CARD)}
    short = ways[("eight_bit", True), ("placement", "offload")]
    assert short.costs == ("weights in 8 bits",) and not short.is_exact and not short.is_slim
    tiled = ways[("placement", "gpu"), ("vae_tiling", True)]
    assert tiled.is_exact and not tiled.costs


def test_weights_in_16_bits_cost_nothing_more_where_a_card_computes_in_them():
    for precision, is_exact in (("auto", True), ("no", False)):
        request = parse("plan", [*TRAIN, "--lora-rank", "4", "--mixed-precision", precision])
        ways = all_ways(request.job, request.given, CARD)
        found = next(way for way in ways if way.changes == {"weights_dtype": "bfloat16"})
        assert found.costs == ("weights in bfloat16",) and found.is_exact is is_exact
