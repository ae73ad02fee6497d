"""The job of ``wandistiller sample``: check everything, encode, denoise, decode, write.

Each model is in memory only while it is needed: the text encoder, then one transformer at a time, then the VAE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from wandistiller.config.sample import PICTURE_SUFFIXES, SampleConfig
from wandistiller.data.media import read_picture, to_bytes, write_clip, write_latents, write_picture
from wandistiller.distributed.context import ClipGroup
from wandistiller.distributed.ranks import Ranks, joined, read_ranks
from wandistiller.errors import OutputError
from wandistiller.flow.guidance import guide, needs_unconditional
from wandistiller.flow.solver import SOLVERS
from wandistiller.memory.auto import Auto
from wandistiller.memory.device_map import reads_files
from wandistiller.memory.encoder_phases import TEXT_ROOM
from wandistiller.memory.experts import Experts
from wandistiller.memory.forecast import forecast
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.placement import Placement, Subject
from wandistiller.memory.subjects import choose_placement, stored_subject
from wandistiller.models.devices import free_memory
from wandistiller.models.latents import denormalise
from wandistiller.models.load import load_model
from wandistiller.models.text import encode_prompts, read_embeddings
from wandistiller.models.text_padding import cut_text, fold_padding, trim_padding
from wandistiller.models.vae_tiles import decode_tiled
from wandistiller.sample.conditioning import Conditioning, encode_first_frame, encode_image_tokens, to_pixels
from wandistiller.sample.job import Job, describe, prepare
from wandistiller.sample.prediction import text_placing
from wandistiller.sample.remedies import find_remedies, foresee, placement_options, with_placement
from wandistiller.sample.sharing import PATIENCE_SECONDS
from wandistiller.terminal import hushed, progress, say


@dataclass(frozen=True)
class Sample:
    """One finished sample: what drew it and the files it is in."""

    prompt: str
    seed: int
    latents: Tensor
    """(channels, frames, height, width), normalised, float32, on the host"""
    files: tuple[Path, ...]


def run_sample(config: SampleConfig) -> list[Sample]:
    """Do the whole job and return the samples in the order of prompts and seeds; each rank those that it wrote."""
    job = prepare(config)
    monitor = Monitor([job.device], lambda failure: find_remedies(job, failure))
    # A device map that does not fit the model is found here, before anything is read.
    placement = choose_placement(placement_name(job), **placement_options(job))
    subject = stored_subject(job.transformers[0], job.dtype)
    placement.predict(subject, job.device)
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)  # what ranks send each other goes over the current one
    pace = _Pace()
    with hushed(not read_ranks().is_first), joined(job.device, PATIENCE_SECONDS) as ranks:
        say(describe(job))
        if isinstance(placement, Auto):
            choice = placement.choose(subject, job.device)
            placement = choice.placement
            job = with_placement(job, choice)
            say(f"Placement {choice}")
        predicted = None
        if ranks.is_first:
            reads = reads_files(job.config.placement_name, job.config.device_map)
            files = job.transformers[0].files if reads else ()
            predicted = forecast(partial(foresee, job), job.device, is_whole=True, files=files)
        if predicted is not None:
            say(predicted.line())
        drawn = _draw(job, placement, monitor, ranks, pace)
    # The ranks have parted, so nobody waits for the VAE.
    with monitor.phase("decoding and writing", "vae"):
        samples = list(write(drawn.job, drawn.latents)) if drawn.is_mine else []
    with hushed(not ranks.is_first):
        if predicted is not None:
            say(predicted.outcome(monitor, pace.seconds))
        if job.device.type != "cpu":
            say("Memory by phase: " + "; ".join(monitor.summary()))
    return samples


class _Pace:
    """How long steps take."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def __call__(self) -> None:
        """Note the end of a step."""
        self._times.append(time.perf_counter())

    @property
    def seconds(self) -> float | None:
        """Of a step, the first and slowest apart; None for a single one."""
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1) if len(self._times) > 1 else None


@dataclass(frozen=True)
class _Drawn:
    """Latents on their way to the VAE."""

    job: Job
    """With the prompts that they are of."""
    latents: Tensor
    is_mine: bool
    """Whether this rank is the one to write them."""


def _draw(job: Job, placement: Placement, monitor: Monitor, ranks: Ranks, pace: _Pace) -> _Drawn:
    """Encode once, on the first rank, and let each group of ranks draw its prompts."""
    with monitor.phase("encoding", "text encoder"):
        encoded = encode(job).moved(torch.device("cpu")) if ranks.is_first else None
        conditioning: Conditioning = ranks.from_first(encoded).moved(job.device)
    group = None
    if ranks.world_size > 1:
        group = ClipGroup(job.config.context_parallel, ranks, job.device)
        job = job.part(group.number, group.count)
        conditioning = replace(conditioning, text=conditioning.text[group.number :: group.count])
    with monitor.phase("denoising", "transformer"):
        latents = denoise(job, conditioning, placement, monitor, group=group, on_step=pace)
    return _Drawn(job, latents, group is None or group.is_first)


def placement_name(job: Job) -> str:
    """On the CPU the weights are in its memory as it is."""
    streams = job.config.placement_name in ("auto", "offload") and job.device.type == "cpu"
    return "gpu" if streams else job.config.placement_name


@torch.no_grad()
def encode(job: Job) -> Conditioning:
    """Turn prompts and picture into tensors; the encoders are gone afterwards."""
    config, first = job.config, job.transformers[0].config
    negative = None
    if config.cond is not None:
        text = read_embeddings(config.cond, first["text_dim"])
        if job.needs_negative:
            assert config.uncond is not None  # prepare() has made sure
            negative = read_embeddings(config.uncond, first["text_dim"])
    else:
        assert job.pipeline is not None  # SampleConfig.check() has made sure
        texts = [*job.prompts, *([config.negative_prompt] if job.needs_negative else [])]
        say(f"Encoding {len(job.prompts)} prompt{'s' if len(job.prompts) > 1 else ''}")
        text = encode_prompts(
            job.pipeline.part("text_encoder"),
            job.pipeline.part("tokenizer"),
            texts,
            device=job.device,
            dtype=job.dtype,
            place=lambda encoder: _place_text_encoder(job, encoder),
        )
        text, negative = (text[:-1], text[-1:]) if job.needs_negative else (text, None)
        free_memory(job.device)
    pictures: dict[str, Tensor] = {}
    if config.image is not None:
        assert job.vae is not None  # prepare() has made sure
        picture = read_picture(config.image)
        vae = load_model(job.vae, dtype=job.vae_dtype, device=job.device)
        pictures = encode_first_frame(vae, to_pixels(picture, job.geometry), job.geometry, job.image, tiled=config.vae_tiling)
        del vae
        if job.image.wants_image_tokens:
            assert job.pipeline is not None
            pictures["image_tokens"] = encode_image_tokens(
                job.pipeline.part("image_encoder"), job.pipeline.part("image_processor"), picture, job.device
            )
        free_memory(job.device)
    tensors = {name: tensor.to(job.device) for name, tensor in pictures.items()}
    on_device = {"device": job.device, "dtype": job.dtype}
    return Conditioning(text.to(**on_device), None if negative is None else negative.to(**on_device), **tensors)


@torch.no_grad()
def denoise(
    job: Job,
    conditioning: Conditioning,
    placement: Placement,
    monitor: Monitor,
    seeds: Sequence[int] | None = None,
    group: ClipGroup | None = None,
    on_step: Callable[[], None] = lambda: None,
    together: int = 1,
) -> Tensor:
    """Follow the flow from noise to latents (samples, channels, frames, height, width), float32, on the host.

    All prompts take each step before any takes the next, so that each expert is loaded once however many prompts there are;
    ``together`` of them are computed as one batch. ``seeds`` has one for each sample, in the place of the configuration's,
    which gives every prompt the same noise. The ranks of a ``group`` draw the same together.
    """

    def make_ready(model: nn.Module) -> None:
        if job.folds_padding:
            fold_padding(model)
        if group is not None:
            group.spread(model)

    experts = Experts(
        job.transformers,
        boundary=job.boundary,
        device=job.device,
        dtype=job.dtype,
        placement=placement,
        prepare=make_ready,
    )
    num_rows = together * job.config.batch_size
    texts = [_batch([_fold(text, job) for text in some], job.config.batch_size) for some in conditioning.text.split(together)]
    negative_text = None if conditioning.negative_text is None else _fold(conditioning.negative_text, job)

    def velocity(noisy: Tensor, sigma: float, timestep: float) -> Tensor:
        model, scale = experts.at(timestep), job.guidance[experts.index_at(timestep)]
        predictions = []
        for rows, text in zip(noisy.split(num_rows), texts, strict=True):
            prediction = _predict(model, rows, timestep, text, conditioning, job)
            if needs_unconditional(scale):
                assert negative_text is not None
                negative = _predict(model, rows, timestep, negative_text, conditioning, job)
                prediction = guide(prediction, negative, scale)
            predictions.append(prediction)
        return torch.cat(predictions)

    latents = noise = _noise(job, seeds).to(job.device)
    experts.at(job.schedule.timesteps[0])  # so that the bar for loading is gone before the bar for steps
    with progress("Sampling", job.schedule.num_steps, "step", monitor.line) as advance:
        for step, latents in enumerate(SOLVERS[job.solver].steps(velocity, noise, job.schedule)):
            advance()
            on_step()
            if step == 1:  # the first one is slow: kernels are loaded
                experts.keep_up()
    experts.release()
    latents = conditioning.place_first_frame(latents).cpu()
    if not torch.isfinite(latents).all():
        raise OutputError(
            "The latents are not finite numbers.",
            why="weights or embeddings hold such numbers, or the precision is too small for this model.",
            fix="Try --dtype bfloat16 or float32; if it stays, the checkpoint is damaged.",
        )
    return latents


def _fold(text: Tensor, job: Job) -> Tensor:
    text = cut_text(text, job.max_text_tokens)
    return trim_padding(text) if job.folds_padding else text


def _batch(texts: Sequence[Tensor], samples_each: int) -> Tensor:
    """Return texts (tokens, width) as a batch, each as often as it has samples; padding that was left away is zeros."""
    return pad_sequence(list(texts), batch_first=True).repeat_interleave(samples_each, dim=0)


def _place_text_encoder(job: Job, encoder: nn.Module) -> None:
    """Put the text encoder where the transformer is going to be, as far as that makes sense for a model used once."""
    name = "gpu" if job.device.type == "cpu" else text_placing(job.config, is_automatic=job.is_automatic) or "auto"
    blocks = list(encoder.get_submodule("encoder.block"))
    choose_placement(name, resident=0, headroom=TEXT_ROOM).attach(Subject(model=encoder, blocks=blocks), job.device)


def write(job: Job, latents: Tensor) -> Iterator[Sample]:
    """Decode the latents one sample at a time and write the files."""
    vae = None
    if job.config.wants_pixels:
        assert job.vae is not None  # prepare() has made sure
        vae = load_model(job.vae, dtype=job.vae_dtype, device=job.device)
    for index, sample in enumerate(_for_the_vae(job, latents)):
        place, draw = divmod(index, job.config.batch_size)
        prompt, seed = job.prompts[place], job.config.seed + draw
        number = job.numbers[place] * job.config.batch_size + draw
        yield Sample(prompt, seed, sample, tuple(_write_one(job, vae, number, sample, job.settings(prompt, seed))))


def _write_one(job: Job, vae: nn.Module | None, number: int, latents: Tensor, settings: dict[str, Any]) -> Iterator[Path]:
    path = _numbered(job.config.output, number, job.num_samples)
    if job.config.latent_path is not None:
        latent_path = _numbered(job.config.latent_path, number, job.num_samples)
        write_latents(latent_path, latents, settings)
        yield latent_path
    if vae is None:
        write_latents(path, latents, settings)
    else:
        frames = to_bytes(_decode(vae, latents, tiled=job.config.vae_tiling))
        if path.suffix.lower() in PICTURE_SUFFIXES:
            write_picture(path, frames, settings)
        else:
            write_clip(path, frames, job.fps, settings)
    say(f"Wrote {path}")
    yield path


def _for_the_vae(job: Job, latents: Tensor) -> Tensor:
    """Return latents in the VAE's channels."""
    return latents if job.adapter is None else job.adapter.up(latents)


def decode(job: Job, latents: Tensor) -> Iterator[np.ndarray]:
    """Yield the pixels of each sample as bytes (frames, height, width, 3); the VAE is in memory for as long."""
    assert job.vae is not None  # prepare() has made sure, where pixels are wanted
    vae = load_model(job.vae, dtype=job.vae_dtype, device=job.device)
    for sample in _for_the_vae(job, latents):
        yield to_bytes(_decode(vae, sample, tiled=job.config.vae_tiling))


@torch.no_grad()
def _decode(vae: nn.Module, latents: Tensor, *, tiled: bool) -> Tensor:
    parameter = next(vae.parameters())
    latents = denormalise(latents[None].to(parameter.device), vae.config).to(parameter.dtype)
    return decode_tiled(vae, latents)[0] if tiled else vae.decode(latents, return_dict=False)[0][0]


def _predict(model: nn.Module, noisy: Tensor, timestep: float, text: Tensor, conditioning: Conditioning, job: Job) -> Tensor:
    """Call the transformer as its kind wants to be called; return the velocity in float32."""
    samples = noisy.shape[0]
    inputs = conditioning.place_first_frame(noisy)
    if conditioning.extra_channels is not None:
        inputs = torch.cat([inputs, conditioning.extra_channels.expand(samples, -1, -1, -1, -1)], dim=1)
    tokens = conditioning.image_tokens
    return model(
        hidden_states=inputs.to(job.dtype),
        timestep=_timesteps(noisy, timestep, conditioning, job),
        encoder_hidden_states=text.expand(samples, -1, -1),
        encoder_hidden_states_image=None if tokens is None else tokens.to(job.dtype).expand(samples, -1, -1),
        return_dict=False,
    )[0].float()


def _timesteps(noisy: Tensor, timestep: float, conditioning: Conditioning, job: Job) -> Tensor:
    """Return one timestep a sample, or one a token where the first frame is given free of noise.

    One a token takes gigabytes for long clips, so a clip without a first frame does without, whatever model draws it.
    """
    if conditioning.first_frame is None:
        return torch.full((noisy.shape[0],), timestep, device=noisy.device)
    patch_frames, patch_height, patch_width = job.transformers[0].config["patch_size"]
    frames, height, width = noisy.shape[2:]
    grid = torch.full((frames // patch_frames, height // patch_height, width // patch_width), timestep, device=noisy.device)
    grid[0] = 0
    return grid.flatten().expand(noisy.shape[0], -1)


def _noise(job: Job, seeds: Sequence[int] | None) -> Tensor:
    """Return the noise to start from, drawn on the host so that it does not depend on device, batch or prompts.

    A student with other channels than its teacher's sees the teacher's noise through its adapter, as it was trained to.
    """
    channels = job.transformers[0].config["out_channels"] if job.adapter is None else job.adapter.teacher_channels
    shape = (1, channels, *job.geometry.latent_shape)
    if seeds is None:
        seeds = [job.config.seed + index for index in range(job.config.batch_size)] * len(job.prompts)
    noise = torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    return noise if job.adapter is None else job.adapter.rotate(noise)


def _numbered(path: Path, index: int, total: int) -> Path:
    return path if total == 1 else path.with_name(f"{path.stem}-{index:0{len(str(total - 1))}d}{path.suffix}")
