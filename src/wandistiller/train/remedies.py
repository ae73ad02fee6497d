"""What would help a training that runs out of memory, in bytes and in time, from this very run's shapes."""

from __future__ import annotations

import math

import torch

from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.distributed.parallel import choose_parallel
from wandistiller.distributed.ranks import read_ranks
from wandistiller.memory.advice import Remedy
from wandistiller.memory.out_of_memory import Failure
from wandistiller.models.stored import StoredModel
from wandistiller.units import Bytes


def find_remedies(config: TrainConfig, transformer: StoredModel, device: torch.device, failure: Failure) -> list[Remedy]:
    """Return what the flags of ``train`` can do."""
    if failure.kind != "device":
        return []
    count = sum(math.prod(transformer.weights.entries[name].shape) for name in transformer.names.values())
    width = 2 if config.weights_dtype == "bfloat16" else 4
    is_full = config.lora_rank == 0
    # Weights, gradients, and the optimiser's own: two moments, and masters for short weights.
    fixed = count * width
    if is_full:
        fixed += count * width + count * (8 if config.optimizer_name == "adamw" else 2)
        fixed += count * 4 if width == 2 and config.rounding == "masters" else 0
    ranks = read_ranks()
    slices = choose_parallel(config.parallel, config.shard_size, ranks).shard_size if config.is_sharded else 1
    fixed //= slices
    held = failure.in_use + (failure.asked or 0)
    activations = max(held - fixed, 0)
    found: list[Remedy] = []
    # Measured on a 5B at video length: full recomputation keeps about 1/25 and costs a third, selective 1/20 and a seventh.
    if config.policy == "none":
        found.append(Remedy(changes={"activation_policy": "selective"}, saves=Bytes(activations * 19 // 20), slowdown=1.14))
        found.append(Remedy(changes={"activation_policy": "full"}, saves=Bytes(activations * 24 // 25), slowdown=1.3))
    elif not config.activations_to_host:
        found.append(Remedy(changes={"activations_to_host": True}, saves=Bytes(activations // 2), slowdown=1.01))
    if config.batch_size > 1:
        half = config.batch_size // 2
        found.append(
            Remedy(
                changes={"batch_size": half, "gradient_accumulation": config.gradient_accumulation * 2},
                saves=Bytes(round(activations * (1 - half / config.batch_size))),
                slowdown=1.05,
            )
        )
    if ranks.world_size > 1 and not config.is_sharded and config.placement == "gpu" and config.optimizer_name == "adamw":
        saves = Bytes(fixed * (ranks.world_size - 1) // ranks.world_size)
        found.append(Remedy(changes={"parallel": "fsdp"}, saves=saves, slowdown=1.1, why="a slice of the model on each card"))
    if is_full and config.optimizer_name == "adamw" and not config.is_sharded:
        found.append(Remedy(changes={"optimizer": "adamw8bit"}, saves=Bytes(count * 6), slowdown=1.03))
    if is_full and config.weights_dtype == "float32":
        change = {"weights_dtype": "bfloat16", "rounding": "stochastic"}
        found.append(Remedy(changes=change, saves=Bytes(count * 4 // slices), why="weights and gradients in 16 bits"))
    if is_full:
        saves = Bytes(fixed - count * width // slices)
        found.append(Remedy(changes={"lora_rank": 32}, saves=saves, why="adapters beside frozen weights"))
    elif config.placement == "gpu" and not config.is_sharded:
        layers = transformer.config["num_layers"]
        saves = Bytes(fixed * (layers - 2) // layers)
        found.append(Remedy(changes={"placement": "offload"}, saves=saves, slowdown=1.05, why="weights in host memory"))
    return found


def find_distill_remedies(config: DistillConfig, failure: Failure) -> list[Remedy]:
    """Return what the flags of ``distill`` can do."""
    if failure.kind != "device":
        return []
    held = failure.in_use + (failure.asked or 0)
    found: list[Remedy] = []
    if config.strategy in ("auto", "gpu", "gpu0") and not config.is_stored:
        saves = Bytes(held // 2)
        found.append(Remedy(changes={"teacher_device_strategy": "offload"}, saves=saves, slowdown=1.1, why="teacher streamed"))
    if config.noisy_source == "dataset" and not config.cache_teacher:
        found.append(Remedy(changes={"cache_teacher": True}, saves=Bytes(held // 2), why="no teacher while training"))
    if config.is_stored and config.rollout_batch > 1:
        half = config.rollout_batch // 2
        found.append(Remedy(changes={"rollout_batch": half}, saves=Bytes(held // 3), slowdown=1.1))
    if config.policy == "none":
        found.append(Remedy(changes={"activation_policy": "selective"}, saves=Bytes(held // 2), slowdown=1.14))
    if config.batch_size > 1:
        half = config.batch_size // 2
        changes = {"batch_size": half, "gradient_accumulation": config.gradient_accumulation * 2}
        found.append(Remedy(changes=changes, saves=Bytes(round(held * (1 - half / config.batch_size) * 0.6)), slowdown=1.05))
    return found
