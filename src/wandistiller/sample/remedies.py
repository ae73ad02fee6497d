"""What would help a sampling that runs out of memory, in bytes and in time, from this very job's shapes."""

from __future__ import annotations

from typing import Any

import torch

from wandistiller.memory.advice import Remedy
from wandistiller.memory.durations import step_seconds
from wandistiller.memory.estimates import margin
from wandistiller.memory.hardware import detect
from wandistiller.memory.out_of_memory import Failure
from wandistiller.memory.placement import Footprint
from wandistiller.memory.rates import copy_rate, matmul_rate
from wandistiller.memory.scene import Scene
from wandistiller.memory.subjects import choose_placement, stored_subject
from wandistiller.memory.uses import Use
from wandistiller.models.vae_tiles import TILE
from wandistiller.sample.job import Job
from wandistiller.units import Bytes

_CPU = torch.device("cpu")


def find_remedies(job: Job, failure: Failure) -> list[Remedy]:
    """Return what the flags of ``sample`` can do about a failure in one of its phases."""
    if failure.kind == "disk":
        return []
    if failure.role == "vae":
        return _for_vae(job, failure)
    found = _for_weights(job, failure)
    if failure.role == "transformer" and failure.kind == "device" and job.config.batch_size > 1:
        weights = footprint(job, job.config.placement_name).device
        rows = Bytes(max(failure.in_use + (failure.asked or 0) - weights, 0))
        half = job.config.batch_size // 2
        saved = Bytes(round(rows * (1 - half / job.config.batch_size)))
        found.append(Remedy(changes={"batch_size": half}, saves=saved, why="and run it again with another seed"))
    return found


def footprint(job: Job, placement: str) -> Footprint:
    """Return what the larger of the transformers takes in a placement."""
    largest = max(job.transformers, key=lambda stored: stored.num_bytes)
    options = placement_options(job) if placement == job.config.placement_name else {"resident": 0}
    return choose_placement(placement, **options).predict(stored_subject(largest, job.dtype), job.device)


def placement_options(job: Job) -> dict[str, Any]:
    """Return the job's own options of its placement."""
    return {
        "resident": job.resident,
        "eight_bit": job.config.eight_bit,
        "device_map": job.config.device_map,
        "max_memory": job.max_memory,
        # Worked out where it is asked for: that takes a moment.
        "headroom": activation_bytes(job) if job.config.placement_name == "auto" and job.device.type != "cpu" else None,
    }


def activation_bytes(job: Job) -> Bytes:
    """Return what a forward pass takes beside the weights, with the margin that a prediction needs."""
    scene, use = Scene(), transformer_use(job)
    scene.play(use.tape, use.repeats)
    taken = _shared_bytes(use, scene.reserved, job.config.context_parallel)
    return Bytes(taken + margin(taken))


def _shared_bytes(use: Use, taken: int, ranks: int) -> int:
    """Return what a forward pass takes on one of the ranks that share its tokens, from what it takes on one alone."""
    if ranks == 1:
        return taken
    width = use.config["num_attention_heads"] * use.config["attention_head_dim"]
    tokens = use.batch_size * use.num_tokens * width * use.dtype.itemsize
    # Queries, keys and values are there twice more on their way to other ranks and from them; or else all ranks' keys and
    # values, in pieces and as one.
    exchanged = 6 * tokens // ranks if use.config["num_attention_heads"] % ranks == 0 else 4 * tokens
    # They become shares when they have been embedded, so the embeddings are there whole, in two layouts.
    return taken // ranks + exchanged + 2 * tokens


def forward_seconds(job: Job) -> float:
    """Return the time of one forward pass with all weights on the device."""
    use = transformer_use(job)
    return step_seconds(use.tape, use.repeats, detect(measures=False)).total


def transformer_use(job: Job) -> Use:
    """Return how the job uses its transformer."""
    config = job.transformers[0].config
    shape = (config["in_channels"], *job.geometry.latent_shape)
    return Use(name="transformer", config=config, latent_shape=shape, batch_size=job.config.batch_size, dtype=job.dtype)


def _for_weights(job: Job, failure: Failure) -> list[Remedy]:
    """Other places for the weights of the text encoder and the transformer; both follow --placement."""
    now = footprint(job, job.config.placement_name)
    found = []
    if failure.kind == "device" and job.device.type != "cpu" and now.devices:
        streamed = footprint(job, "offload")
        bus = streamed.page_locked / copy_rate(job.device)
        slowdown = max(1.0, bus / forward_seconds(job))
        if job.config.placement_name not in ("offload", "disk", "cpu"):
            saves = Bytes(now.device - streamed.device)
            found.append(Remedy(changes={"placement": "offload"}, saves=saves, slowdown=slowdown, why="weights in host memory"))
        if job.dtype.itemsize == 4:
            found.append(Remedy(changes={"dtype": "bfloat16"}, saves=Bytes(now.device // 2), slowdown=0.5))
        # The CPU is some hundred times slower than a card, and takes everything off it.
        slow = matmul_rate(job.device, job.dtype) / matmul_rate(_CPU, job.dtype)
        found.append(Remedy(changes={"placement": "cpu"}, saves=now.device, slowdown=max(slow, 1.0), why="the CPU computes"))
    if failure.kind == "host":
        on_host = now.host + now.page_locked
        if job.config.placement_name == "offload" and not job.config.eight_bit:
            found.append(Remedy(changes={"eight_bit": True}, saves=Bytes(on_host // 2), why="at a small error"))
        if job.config.placement_name != "disk" and job.device.type != "cpu":
            other = footprint(job, "disk")
            found.append(
                Remedy(
                    changes={"placement": "disk"},
                    saves=Bytes(on_host - other.host - other.page_locked),
                    slowdown=max(1.0, other.disk / 1.5e9 / forward_seconds(job)),
                    why="read from a disk of 1.5 GB/s in every step",
                )
            )
    return found


def _for_vae(job: Job, failure: Failure) -> list[Remedy]:
    found = []
    held = failure.in_use + (failure.asked or 0)
    area = job.geometry.width * job.geometry.height
    tile_area = (TILE * job.geometry.spatial) ** 2
    if not job.config.vae_tiling and area > tile_area:
        found.append(Remedy(changes={"vae_tiling": True}, saves=Bytes(round(held * (1 - tile_area / area))), slowdown=1.5))
    if job.vae_dtype.itemsize == 4 and job.device.type != "cpu":
        found.append(Remedy(changes={"vae_dtype": "bfloat16"}, saves=Bytes(held // 2), slowdown=0.7, why="a small loss"))
    return found
