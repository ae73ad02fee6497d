"""What would help a sampling that runs out of memory: each change is predicted as the run itself is, in bytes and in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from wandistiller.config.sample import SampleConfig
from wandistiller.errors import UsageError
from wandistiller.memory.advice import Remedy
from wandistiller.memory.auto import Choice
from wandistiller.memory.estimates import Phase
from wandistiller.memory.forecast import hardware_of
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.out_of_memory import Failure
from wandistiller.sample.job import Job
from wandistiller.sample.prediction import denoising_work, predict_sample
from wandistiller.units import Bytes

Way = tuple[dict[str, Any], str]
"""Changes, and a word on them."""
_PHASES = {"text encoder": "encoding text", "transformer": "denoising", "vae": "decoding"}


def find_remedies(job: Job, failure: Failure) -> Iterator[Remedy]:
    """Yield what the flags of ``sample`` can do about a failure in one of its phases."""
    if not failure.is_foreseen or failure.role not in _PHASES:
        return
    hardware = hardware_of(job.device, measures=False)  # measuring would need memory
    now = _phase(job, job.settled, hardware, failure.role)
    for changes, why in _ways(job, failure):
        config = replace(job.settled, **changes)
        try:
            config.check()
        except UsageError:  # it does not go with another flag
            continue
        other = _phase(job, config, hardware, failure.role)
        slowdown = other.seconds / config.batch_size * job.config.batch_size / now.seconds if now.seconds else 1.0
        yield Remedy(changes=changes, saves=_saved(now, other, failure), slowdown=slowdown, why=why)


def _phase(job: Job, config: SampleConfig, hardware: Hardware, role: str) -> Phase:
    phases = _predicted(job, config, hardware)
    return next((phase for phase in phases if phase.name == _PHASES[role]), phases[-1])


def _predicted(job: Job, config: SampleConfig, hardware: Hardware) -> tuple[Phase, ...]:
    count = len(job.prompts)
    return predict_sample(config, job.shapes, hardware, num_prompts=count, is_automatic=job.is_automatic).phases


def _saved(now: Phase, other: Phase, failure: Failure) -> Bytes:
    computing = now.peak - other.peak if failure.is_computing else 0
    return Bytes(computing + (now.on_host - other.on_host if failure.kind == "host" else 0))


def _ways(job: Job, failure: Failure) -> Iterator[Way]:
    config, is_card = job.config, job.device.type != "cpu"
    unstreamed = {} if config.resident == "auto" else {"resident": "auto"}
    if failure.role == "vae":
        yield from _vae_ways(job)
        return
    if failure.kind == "device" and is_card and config.placement_name != "cpu":
        if config.placement_name not in ("offload", "disk"):
            yield {"placement": "offload"}, "weights in host memory"
        if job.dtype.itemsize == 4:
            yield {"dtype": "bfloat16"}, ""
        yield {"placement": "cpu", **unstreamed}, "the CPU computes"
    if failure.kind == "host":
        if config.placement_name == "offload" and not config.eight_bit:
            yield {"eight_bit": True}, "at a small error"
        if config.placement_name != "disk" and is_card:
            yield {"placement": "disk", **unstreamed}, "read from disk in every step"
    if failure.role == "transformer" and failure.is_computing and config.batch_size > 1:
        yield {"batch_size": config.batch_size // 2}, "and run it again with another seed"


def _vae_ways(job: Job) -> Iterator[Way]:
    if not job.config.vae_tiling:
        yield {"vae_tiling": True}, ""
    if job.vae_dtype.itemsize == 4 and job.device.type != "cpu":
        yield {"vae_dtype": "bfloat16"}, "a small loss"


def placement_options(job: Job) -> dict[str, Any]:
    """Return the job's own options of its placement."""
    return {
        "resident": job.resident,
        "eight_bit": job.config.eight_bit,
        "device_map": job.config.device_map,
        "max_memory": job.max_memory,
        # Worked out where it is asked for: that takes a moment.
        "headroom": beside_weights(job) if job.config.placement_name == "auto" and job.device.type != "cpu" else None,
    }


def with_placement(job: Job, choice: Choice) -> Job:
    """Return a job whose weights are where ``auto`` has chosen."""
    stays = str(getattr(choice.placement, "resident", "auto"))
    chosen: dict[str, Any] = {"placement": choice.name, "resident": stays}
    return replace(job, config=replace(job.config, **chosen), is_automatic=True)


def foresee(job: Job, hardware: Hardware) -> Phase:
    """Return the phase that holds most of the device, with the time of a solver's step and what takes that."""
    phases = _predicted(job, job.settled, hardware)
    step = next(phase for phase in phases if phase.name == "denoising")
    largest = max(phases, key=lambda phase: phase.reserved)
    return replace(largest, seconds=step.seconds * len(job.prompts), num_steps=step.num_steps, work=step.work)


def beside_weights(job: Job) -> Bytes:
    """Return what a step will hold of the device beside the transformer's weights."""
    hardware = hardware_of(job.device, measures=False)
    work = denoising_work(job.settled, job.shapes, hardware, num_prompts=len(job.prompts))
    taken = replace(work, placing=replace(work.placing, name="gpu")).phase(hardware).beside("transformer")
    return _shared_bytes(job, taken)


def _shared_bytes(job: Job, taken: Bytes) -> Bytes:
    """Return what a forward pass takes on one of the ranks that share its tokens, from what it takes on one alone."""
    ranks = job.config.context_parallel
    if ranks == 1:
        return taken
    config = job.transformers[0].config
    width = config["num_attention_heads"] * config["attention_head_dim"]
    tokens = job.config.batch_size * job.num_tokens * width * job.dtype.itemsize
    # Queries, keys and values are there twice more on their way to other ranks and from them; or else all ranks' keys and
    # values, in pieces and as one.
    exchanged = 6 * tokens // ranks if config["num_attention_heads"] % ranks == 0 else 4 * tokens
    # They become shares when they have been embedded, so the embeddings are there whole, in two layouts.
    return Bytes(taken // ranks + exchanged + 2 * tokens)
