"""Ways to do a job: everything that its user has left open, the fastest first, and what each way costs in accuracy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wandistiller.config.command import CommandConfig
from wandistiller.config.distill import DistillConfig
from wandistiller.config.sample import SampleConfig
from wandistiller.config.train import TrainConfig
from wandistiller.errors import UsageError
from wandistiller.memory.hardware import Hardware
from wandistiller.train.start_checks import check_ranks

Changes = Mapping[str, Any]
POLICIES = (
    {"activation_policy": "none", "activations_to_host": False},
    {"activation_policy": "selective", "activations_to_host": False},
    {"activation_policy": "selective", "activations_to_host": True},
    {"activation_policy": "full", "activations_to_host": False},
    {"activation_policy": "full", "activations_to_host": True},
)
"""From the fastest to the smallest."""
_DECODING = ({"vae_dtype": "float32"}, {"vae_dtype": "float32", "vae_tiling": True})
_DECODING_IN_16_BITS = ({"vae_dtype": "bfloat16"}, {"vae_dtype": "bfloat16", "vae_tiling": True})
_SHORT_WEIGHTS = "weights in bfloat16"
_COSTS: Mapping[tuple[str, Any], str] = {
    ("weights_dtype", "bfloat16"): _SHORT_WEIGHTS,
    ("dtype", "bfloat16"): "bfloat16 throughout",
    ("rounding", "stochastic"): "updates rounded at random",
    ("optimizer", "adamw8bit"): "optimiser in 8 bits",
    ("optimizer", "adafactor"): "another optimiser",
    ("teacher_dtype", "float8"): "teacher in 8 bits",
    ("eight_bit", True): "weights in 8 bits",
    ("vae_dtype", "bfloat16"): "VAE in bfloat16",
}
"""What settings cost in accuracy."""
_AUTOMATIC = ("placement", "teacher_device_strategy", "parallel")
"""Fields whose ``auto`` stands for one of the ways."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to do a job, and where it stands among all of them."""

    changes: Changes
    """Fields of the job that are set otherwise than they are."""
    policy: int = 0
    """Which of the policies it follows, of which each is slower and smaller than the one before."""
    halvings: int = 0
    """How often the batch is halved."""
    tier: int = 0
    """Which of the places its weights live in, of which each is slower than the one before."""
    is_slim: bool = False
    """Whether it gives up accuracy for memory alone, and is no faster."""
    costs: tuple[str, ...] = ()
    """What it costs in accuracy, against the job as it was asked for."""
    is_exact: bool = True
    """Whether that is nothing, or no more than the card rounds to anyway."""


@dataclass(frozen=True)
class _Space:
    """What can be combined."""

    policies: Sequence[Changes]
    places: Sequence[Sequence[Changes]]
    """In tiers, the fastest first."""
    savings: Sequence[Changes] = ({},)
    """Other precisions and optimisers, what costs nothing first."""


def all_ways(job: CommandConfig, given: frozenset[str], hardware: Hardware) -> list[Way]:
    """Return every way that keeps what the user has given and that the program would run."""
    given = kept(job, given)
    space = _space(job, hardware)
    policies = _policies(space.policies, job, given)
    tiers = [found for tier in space.places if (found := _possible(tier, job, given, fallback=False))] or [[{}]]
    savings = _possible(space.savings, job, given)
    batches = [{}, *smaller_batches(job, given)]
    rounds_anyway = hardware.card is not None and getattr(job, "mixed_precision", "no") in ("auto", "bf16")
    seen: list[Changes] = []
    ways = []
    for (policy, of_policy), (halvings, batch), (tier, places) in itertools.product(
        enumerate(policies), enumerate(batches), enumerate(tiers)
    ):
        for place, saving in itertools.product(places, savings):
            changes = _changed(job, {**of_policy, **batch, **place, **saving})
            if changes in seen or not _is_valid(job, changes, hardware.num_ranks):
                continue
            seen.append(changes)
            costs = _costs(job, changes)
            is_slim = any(_is_rough(cost, rounds_anyway) for cost in _costs(job, _changed(job, saving)))
            is_exact = not any(_is_rough(cost, rounds_anyway) for cost in costs)
            ways.append(
                Way(
                    changes=changes,
                    policy=policy,
                    halvings=halvings,
                    tier=tier,
                    is_slim=is_slim,
                    costs=costs,
                    is_exact=is_exact,
                )
            )
    return ways


def has_usual_policy(job: CommandConfig) -> bool:
    """Return whether a job has one of the policies of which each is slower than the one before."""
    return not hasattr(job, "activations_to_host") or any(not _changed(job, each) for each in POLICIES)


def kept(job: CommandConfig, given: frozenset[str]) -> frozenset[str]:
    """Return what of the given fields is a decision: ``auto`` leaves one open, unless another flag says what it stands for."""
    says = {"placement": "placement_name", "teacher_device_strategy": "strategy"}
    return given - {name for name in _AUTOMATIC if getattr(job, says.get(name, name), getattr(job, name, None)) == "auto"}


def is_left_to_the_program(job: CommandConfig, changes: Changes, given: frozenset[str]) -> bool:
    """Return whether a way is one of those that the job's own ``auto`` stands for."""
    open_names = {name for name in _AUTOMATIC if name in changes and name not in kept(job, given)}
    automatic = {name for name in open_names if getattr(job, name) == "auto"}
    return changes.keys() <= automatic | {"resident", "teacher_resident"}


def smaller_batches(job: Any, given: frozenset[str]) -> Iterator[Changes]:
    """Yield smaller batches with more accumulation, so that a step trains on the same samples."""
    if "gradient_accumulation" in given or not hasattr(job, "gradient_accumulation"):
        return
    batch, accumulation = job.batch_size, job.gradient_accumulation
    while batch % 2 == 0:
        batch, accumulation = batch // 2, accumulation * 2
        yield {"batch_size": batch, "gradient_accumulation": accumulation}


def _space(job: CommandConfig, hardware: Hardware) -> _Space:
    if isinstance(job, SampleConfig):
        has_vae = job.wants_pixels or job.image is not None
        decoding = (*_DECODING, *_DECODING_IN_16_BITS) if has_vae else ({},)
        if hardware.card is None:
            return _Space(decoding, [[{}]], savings=[{}, {"dtype": "bfloat16"}])
        return _Space(decoding, _sample_places(hardware))
    if isinstance(job, DistillConfig):
        places: Sequence[Sequence[Changes]] = _teacher_places(hardware) if hardware.card else [[{}]]
        return _Space(POLICIES, _together(places, hardware), [{"optimizer": name} for name in _OPTIMISERS])
    if isinstance(job, TrainConfig):
        places = _train_places(job) if hardware.card else [[{}]]
        return _Space(POLICIES, _together(places, hardware), list(_train_savings(job)))
    return _Space([{"vae_gradient_checkpointing": value} for value in (False, True)], [[{}]])


_OPTIMISERS = ("adamw", "adamw8bit", "adafactor")


def _sample_places(hardware: Hardware) -> list[list[Changes]]:
    streamed: list[Changes] = [{"placement": "offload"}, {"placement": "offload", "eight_bit": True}]
    if hardware.cards_each > 1:
        streamed.insert(0, {"placement": "balanced"})
    return [[{"placement": "gpu"}], streamed, [{"placement": "disk"}], [{"placement": "cpu"}]]


def _teacher_places(hardware: Hardware) -> list[list[Changes]]:
    streamed: list[Changes] = [
        {"teacher_device_strategy": "offload"},
        {"teacher_device_strategy": "offload", "teacher_dtype": "float8"},
    ]
    on_cards: list[Changes] = [{"teacher_device_strategy": "gpu"}]
    if hardware.num_ranks > 1:
        on_cards.append({"teacher_device_strategy": "sharded"})
    return [on_cards, streamed, [{"teacher_device_strategy": "disk"}], [{"teacher_device_strategy": "cpu"}]]


def _train_places(job: TrainConfig) -> list[list[Changes]]:
    names = ("gpu", "offload", "disk", "cpu") if job.lora_rank else ("gpu", "offload")
    return [[{"placement": name}] for name in names]


def _together(tiers: Iterable[Sequence[Changes]], hardware: Hardware) -> list[list[Changes]]:
    """Let several ranks each have all of what is trained, or a slice of it; within a machine hsdp is the same as fsdp."""
    if hardware.num_ranks == 1:
        return [list(tier) for tier in tiers]
    names = ("ddp", "hsdp", "fsdp") if hardware.num_nodes > 1 else ("ddp", "fsdp")
    return [[{**place, "parallel": name} for place in tier for name in names] for tier in tiers]


def _train_savings(job: TrainConfig) -> Iterator[Changes]:
    if job.lora_rank:
        yield from ({"weights_dtype": name} for name in ("float32", "bfloat16"))
        return
    weights: list[Changes] = [
        {"weights_dtype": "float32"},
        {"weights_dtype": "bfloat16", "rounding": "masters"},
        {"weights_dtype": "bfloat16", "rounding": "stochastic"},
    ]
    for optimiser, precision in itertools.product(_OPTIMISERS, weights):
        yield {**precision, "optimizer": optimiser}


def _possible(ways: Iterable[Changes], job: Any, given: frozenset[str], *, fallback: bool = True) -> list[Changes]:
    """Return those that leave alone what is given; the job as it is where none does."""
    found = [way for way in ways if all(name not in given or getattr(job, name) == value for name, value in way.items())]
    return found if found or not fallback else [{}]


def _policies(options: Sequence[Changes], job: Any, given: frozenset[str]) -> list[Changes]:
    """Return the policies that leave alone what is given, and the job's own also where it is none of the usual ones.

    Where pixels count, the VAE that they are looked at through may be recomputed, too.
    """
    found = _possible(options, job, given)
    if all(_changed(job, each) for each in found):
        found.insert(0, {})
    if not getattr(job, "pixel_loss_weight", 0.0) or "vae_gradient_checkpointing" in given:
        return found
    plain, recomputed = ({"vae_gradient_checkpointing": value} for value in (False, True))
    return [*({**policy, **plain} for policy in found[:2]), *({**policy, **recomputed} for policy in found)]


def _changed(job: Any, settings: Changes) -> Changes:
    return {name: value for name, value in settings.items() if getattr(job, name) != value}


def _costs(job: Any, changes: Changes) -> tuple[str, ...]:
    costs = [_COSTS[setting] for setting in changes.items() if setting in _COSTS]
    return tuple(costs)


def _is_rough(cost: str, rounds_anyway: bool) -> bool:
    """Products are of 16 bits anyway where a card computes in bfloat16, and what is trained has a float32 copy."""
    return not (rounds_anyway and cost == _SHORT_WEIGHTS)


def _is_valid(job: CommandConfig, changes: Changes, num_ranks: int) -> bool:
    try:
        changed = replace(job, **changes)
        changed.check()
        if isinstance(changed, TrainConfig):
            check_ranks(changed, num_ranks)
    except UsageError:
        return False
    return True
