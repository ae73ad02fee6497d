"""What would help a training that runs out of memory: each change is predicted as the run itself was, in bytes and in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from wandistiller.checkpoint.training_state import TrainingStates
from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.training import TrainingConfig
from wandistiller.distributed.ranks import read_ranks
from wandistiller.memory.advice import Remedy
from wandistiller.memory.estimates import Phase
from wandistiller.memory.forecast import of_this_job
from wandistiller.memory.hardware import Hardware, detect
from wandistiller.memory.out_of_memory import Failure
from wandistiller.memory.works import Passes, Training
from wandistiller.models.shapes import Shapes
from wandistiller.train.distill_job import common_patch
from wandistiller.train.prediction import asking_work, distill_work, planned_pixels, train_work
from wandistiller.units import Bytes

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)
Way = tuple[dict[str, Any], str]
"""Changes, and a word on them."""


_ANEW = {"optimizer", "weights_dtype", "rounding", "lora_rank", "placement"}
"""What a training that goes on cannot change: its state would be of another kind."""


def going_on(output_dir: Path, find: Callable[[Failure], Iterable[Remedy]]) -> Callable[[Failure], Iterator[Remedy]]:
    """Return the remedies for a training whose states are here: where it has one, those with which it can go on."""

    def remedies(failure: Failure) -> Iterator[Remedy]:
        is_saved = TrainingStates(output_dir / "states", 1).newest() is not None
        if is_saved:
            failure.also = {"resume": "auto"}
        yield from (remedy for remedy in find(failure) if not (is_saved and remedy.changes.keys() & _ANEW))

    return remedies


def find_remedies(config: TrainConfig, shapes: Shapes, failure: Failure) -> Iterable[Remedy]:
    """Return what the flags of ``train`` can do."""
    if not failure.is_foreseen:
        return []

    def work(changed: TrainConfig, hardware: Hardware) -> Training:
        return train_work(changed, shapes, hardware, planned_pixels(changed, shapes.vae))

    ways = _train_ways(config) if failure.is_computing else list(_host_ways(config))
    return _compared(config, ways, work, failure)


def find_distill_remedies(
    config: DistillConfig, shapes: Shapes, student: Mapping[str, Any], failure: Failure
) -> Iterable[Remedy]:
    """Return what the flags of ``distill`` can do."""
    if not failure.is_foreseen:
        return []
    if failure.role == "teacher" and config.is_stored:
        ways = list(_asking_ways(config) if failure.is_computing else _teacher_host_ways(config))
        return _compared(config, ways, _asking_work(shapes), failure)
    teacher_ways = _teacher_ways if failure.is_computing else _teacher_host_ways
    ways = list(_activation_ways(config) if failure.is_computing else _host_ways(config))
    ways = [*teacher_ways(config), *ways] if config.asks_while_training else ways
    return _compared(config, ways, _distill_work(shapes, student), failure)


def _asking_work(shapes: Shapes) -> Callable[[DistillConfig, Hardware], Passes]:
    def work(changed: DistillConfig, hardware: Hardware) -> Passes:
        return asking_work(changed, shapes, hardware, planned_pixels(changed, shapes.vae))

    return work


def _distill_work(shapes: Shapes, student: Mapping[str, Any]) -> Callable[[DistillConfig, Hardware], Training]:
    def work(changed: DistillConfig, hardware: Hardware) -> Training:
        pixels = planned_pixels(changed, shapes.vae, common_patch(student, shapes.transformers[0]))
        return distill_work(changed, shapes, student, hardware, pixels)

    return work


def _train_ways(config: TrainConfig) -> list[Way]:
    ways = list(_activation_ways(config))
    is_full = config.lora_rank == 0
    if is_full and config.optimizer_name == "adamw" and config.placement == "gpu" and not config.is_sharded:
        ways.append(({"optimizer": "adamw8bit"}, ""))
    if is_full and config.weights_dtype == "float32":
        rounds = config.placement == "gpu" and config.optimizer_name == "adamw"  # elsewhere there are float32 copies
        changes: dict[str, Any] = {"weights_dtype": "bfloat16", **({"rounding": "stochastic"} if rounds else {})}
        ways.append((changes, "weights and gradients in 16 bits"))
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
        yield smaller_batches(config), ""


def smaller_batches(config: TrainingConfig) -> dict[str, Any]:
    """Return the changes that make more batches of a step's samples, all of them alike."""
    parts = next(each for each in range(2, config.batch_size + 1) if config.batch_size % each == 0)
    return {"batch_size": config.batch_size // parts, "gradient_accumulation": config.gradient_accumulation * parts}


def _host_ways(config: TrainConfig | DistillConfig) -> Iterator[Way]:
    """Yield what spares host memory where a card computes."""
    if config.activations_to_host:
        yield {"activations_to_host": False}, "what is kept stays on the card"


def _teacher_host_ways(config: DistillConfig) -> Iterator[Way]:
    if config.strategy in ("auto", "offload", "cpu"):
        yield {"teacher_device_strategy": "disk"}, "read from disk for each question"


def _asking_ways(config: DistillConfig) -> Iterator[Way]:
    if config.rollout_batch > 1:
        yield {"rollout_batch": config.rollout_batch // 2}, ""
    yield from _teacher_ways(config)


def _teacher_ways(config: DistillConfig) -> Iterator[Way]:
    if config.strategy in ("auto", "gpu", "gpu0"):
        yield {"teacher_device_strategy": "offload"}, "teacher streamed"
    is_one = not (config.output_weight and config.guidance_weight)
    if config.noisy_source == "dataset" and not config.cache_teacher and not config.feature_weight and is_one:
        yield {"cache_teacher": True}, "no teacher while training"


def _compared(
    config: ConfigT, ways: list[Way], work: Callable[[ConfigT, Hardware], Training | Passes], failure: Failure
) -> Iterator[Remedy]:
    """Yield the ways with what each saves and costs against the run as it is."""
    hardware = of_this_job(detect(measures=False))  # measuring would need memory
    now, seconds = _taken(work(config, hardware), hardware)
    for changes, why in ways:
        other, longer = _taken(work(replace(config, **changes), hardware), hardware)
        is_known = 0 < seconds < float("inf") and longer < float("inf")
        slowdown = longer / seconds if is_known else 1.0
        saves = now.reserved - other.reserved if failure.is_computing else 0
        saves += now.on_host - other.on_host if failure.kind == "host" else 0
        yield Remedy(changes=changes, saves=Bytes(saves), slowdown=slowdown, why=why)


def _taken(work: Training | Passes, hardware: Hardware) -> tuple[Phase, float]:
    """Return what a work takes, and its time; that of passes for one sample, as their batches may differ."""
    phase = work.phase(hardware)
    return phase, phase.seconds / (work.use.batch_size if isinstance(work, Passes) else 1)
