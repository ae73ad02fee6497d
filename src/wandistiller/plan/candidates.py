"""What can be changed about a job to make it fit or faster, without changing what it computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from wandistiller.config.command import CommandConfig
from wandistiller.config.distill import DistillConfig
from wandistiller.config.sample import SampleConfig
from wandistiller.config.train import TrainConfig
from wandistiller.errors import UsageError

Changes = Mapping[str, Any]
POLICIES = (
    {"activation_policy": "none", "activations_to_host": False},
    {"activation_policy": "selective", "activations_to_host": False},
    {"activation_policy": "selective", "activations_to_host": True},
    {"activation_policy": "full", "activations_to_host": False},
    {"activation_policy": "full", "activations_to_host": True},
)
"""From the fastest to the smallest."""


def candidates(job: CommandConfig, given: frozenset[str], num_ranks: int = 1) -> Iterator[Changes]:
    """Yield changes of fields that the user has not set, the job as it is first; ``num_ranks`` processes train together."""
    seen = []
    for changes in itertools.chain([{}], _together(_ways(job), num_ranks)):
        allowed = {name: value for name, value in changes.items() if name not in given and getattr(job, name) != value}
        # What was asked for by an alias is set too.
        is_possible = all(name not in given or getattr(job, name) == value for name, value in changes.items())
        if is_possible and allowed not in seen and _is_valid(job, allowed):
            seen.append(allowed)
            yield allowed


def _together(ways: Iterable[Changes], num_ranks: int) -> Iterator[Changes]:
    """Yield the ways of several ranks: each with all of the model, or with a slice of it."""
    for way in ways:
        is_whole = way.get("placement", "gpu") != "gpu" or way.get("optimizer", "adamw") != "adamw"
        if num_ranks == 1 or "activation_policy" not in way:
            yield way
            continue
        for parallel in ("ddp",) if is_whole else ("ddp", "fsdp", "hsdp"):
            yield {**way, "parallel": parallel}


def smaller_batches(job: Any, given: frozenset[str]) -> Iterator[Changes]:
    """Yield smaller batches with more accumulation, so that a step trains on the same samples."""
    if {"batch_size", "gradient_accumulation"} & given or not hasattr(job, "gradient_accumulation"):
        return
    batch, accumulation = job.batch_size, job.gradient_accumulation
    while batch % 2 == 0:
        batch, accumulation = batch // 2, accumulation * 2
        yield {"batch_size": batch, "gradient_accumulation": accumulation}


def _ways(job: CommandConfig) -> Iterable[Changes]:
    if isinstance(job, TrainConfig):
        return _train_ways(job)
    if isinstance(job, DistillConfig):
        return _distill_ways()
    if isinstance(job, SampleConfig):
        return _sample_ways()
    return [{"vae_gradient_checkpointing": value} for value in (False, True)]


def _train_ways(job: TrainConfig) -> Iterator[Changes]:
    if job.lora_rank:
        weights: list[Changes] = [
            {"weights_dtype": "bfloat16", "placement": "gpu"},
            {"weights_dtype": "bfloat16", "placement": "offload"},
        ]
    else:
        weights = [
            {"weights_dtype": "bfloat16", "rounding": "masters", "placement": "gpu", "optimizer": "adamw"},
            {"weights_dtype": "bfloat16", "rounding": "stochastic", "placement": "gpu", "optimizer": "adamw"},
            {"weights_dtype": "bfloat16", "rounding": "masters", "placement": "gpu", "optimizer": "adamw8bit"},
            {"weights_dtype": "bfloat16", "rounding": "masters", "placement": "offload", "optimizer": "adamw"},
        ]
    for policy, way in itertools.product(POLICIES, weights):
        yield {**policy, **way}


def _distill_ways() -> Iterator[Changes]:
    teachers: list[Changes] = [
        {"teacher_device_strategy": "gpu"},
        {"teacher_device_strategy": "offload", "teacher_resident": "0"},
        {"teacher_device_strategy": "offload", "teacher_resident": "0", "teacher_dtype": "float8"},
        {"teacher_device_strategy": "cpu"},
    ]
    for policy, teacher in itertools.product(POLICIES, teachers):
        yield {**policy, **teacher}


def _sample_ways() -> Iterator[Changes]:
    places: list[Changes] = [
        {"placement": "gpu"},
        {"placement": "offload", "resident": "0"},
        {"placement": "offload", "resident": "0", "eight_bit": True},
        {"placement": "cpu"},
    ]
    decoding: list[Changes] = [{}, {"vae_dtype": "bfloat16"}, {"vae_dtype": "bfloat16", "vae_tiling": True}]
    for place, decode in itertools.product(places, decoding):
        yield {**place, **decode}


def _is_valid(job: CommandConfig, changes: Changes) -> bool:
    try:
        replace(job, **changes).check()
    except UsageError:
        return False
    return True
