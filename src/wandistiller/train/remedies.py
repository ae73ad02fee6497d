"""What would help a training that runs out of memory: each change is predicted as the run itself was, in bytes and in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.training import TrainingConfig
from wandistiller.distributed.ranks import read_ranks
from wandistiller.memory.advice import Remedy
from wandistiller.memory.estimates import Phase
from wandistiller.memory.hardware import Hardware, detect
from wandistiller.memory.out_of_memory import Failure
from wandistiller.memory.works import Training
from wandistiller.models.shapes import Shapes
from wandistiller.train.forecast import of_this_job
from wandistiller.train.prediction import distill_work, planned_pixels, train_work
from wandistiller.units import Bytes

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)
Way = tuple[dict[str, Any], str]
"""Changes, and a word on them."""


def find_remedies(config: TrainConfig, shapes: Shapes, failure: Failure) -> list[Remedy]:
    """Return what the flags of ``train`` can do."""
    if failure.kind != "device":
        return []

    def work(changed: TrainConfig, hardware: Hardware) -> Training:
        return train_work(changed, shapes, hardware, planned_pixels(changed, shapes.vae))

    return _compared(config, _train_ways(config), work)


def find_distill_remedies(config: DistillConfig, shapes: Shapes, student: Mapping[str, Any], failure: Failure) -> list[Remedy]:
    """Return what the flags of ``distill`` can do."""
    if failure.kind != "device":
        return []
    is_asking = failure.role == "teacher" and config.is_stored
    if is_asking and config.rollout_batch > 1:
        half = config.rollout_batch // 2
        held = failure.in_use + (failure.asked or 0)
        found = [Remedy(changes={"rollout_batch": half}, saves=Bytes(held // 3), slowdown=1.1)]
        return [*found, *_compared(config, list(_teacher_ways(config)), _distill_work(shapes, student))]
    ways = [*_teacher_ways(config), *_activation_ways(config)] if config.asks_while_training else list(_activation_ways(config))
    return _compared(config, ways, _distill_work(shapes, student))


def _distill_work(shapes: Shapes, student: Mapping[str, Any]) -> Callable[[DistillConfig, Hardware], Training]:
    def work(changed: DistillConfig, hardware: Hardware) -> Training:
        found = distill_work(changed, shapes, student, hardware, planned_pixels(changed, shapes.vae))
        return found if changed.asks_while_training else replace(found, teacher=None)

    return work


def _train_ways(config: TrainConfig) -> list[Way]:
    ways = list(_activation_ways(config))
    is_full = config.lora_rank == 0
    if is_full and config.optimizer_name == "adamw" and config.placement == "gpu" and not config.is_sharded:
        ways.append(({"optimizer": "adamw8bit"}, ""))
    if is_full and config.weights_dtype == "float32":
        ways.append(({"weights_dtype": "bfloat16", "rounding": "stochastic"}, "weights and gradients in 16 bits"))
    if is_full:
        ways.append(({"lora_rank": 32}, "adapters beside frozen weights"))
    if config.placement == "gpu" and not config.is_sharded and not config.cuda_graphs:
        if read_ranks().world_size == 1:
            ways.append(({"placement": "offload"}, "weights in host memory"))
        elif config.optimizer_name == "adamw":
            ways.append(({"parallel": "fsdp"}, "a slice of the model on each card"))
    return ways


def _activation_ways(config: TrainConfig | DistillConfig) -> Iterator[Way]:
    if config.policy == "none":
        yield {"activation_policy": "selective"}, ""
        yield {"activation_policy": "full"}, ""
    elif not config.activations_to_host and not config.cuda_graphs:
        yield {"activations_to_host": True}, "beside the computation"
    if config.batch_size > 1:
        half = config.batch_size // 2
        yield {"batch_size": half, "gradient_accumulation": config.gradient_accumulation * 2}, ""


def _teacher_ways(config: DistillConfig) -> Iterator[Way]:
    if config.strategy in ("auto", "gpu", "gpu0"):
        yield {"teacher_device_strategy": "offload"}, "teacher streamed"
    if config.noisy_source == "dataset" and not config.cache_teacher and not config.feature_weight:
        yield {"cache_teacher": True}, "no teacher while training"


def _compared(config: ConfigT, ways: list[Way], work: Callable[[ConfigT, Hardware], Training]) -> list[Remedy]:
    """Return the ways with what each saves and costs against the run as it is."""
    hardware = of_this_job(detect(measures=False))  # measuring would need memory
    now = work(config, hardware).phase(hardware)
    found = []
    for changes, why in ways:
        other = work(replace(config, **changes), hardware).phase(hardware)
        saves = Bytes(now.reserved - other.reserved)
        found.append(Remedy(changes=changes, saves=saves, slowdown=_ratio(other, now), why=why))
    return found


def _ratio(other: Phase, now: Phase) -> float:
    is_known = 0 < now.seconds < float("inf") and other.seconds < float("inf")
    return other.seconds / now.seconds if is_known else 1.0
