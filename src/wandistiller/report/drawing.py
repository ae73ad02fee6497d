"""Teacher and student draw: the sampler's own steps, each prompt from noise of its own that is the same for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wandistiller.config.report import ReportConfig
from wandistiller.config.sample import SampleConfig
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.subjects import choose_placement
from wandistiller.models.devices import free_memory
from wandistiller.report.run_folder import RunFolder
from wandistiller.report.subjects import Size
from wandistiller.sample.job import Job, prepare
from wandistiller.sample.remedies import placement_options
from wandistiller.sample.sampler import decode, denoise, encode, placement_name
from wandistiller.terminal import say

_TOKENS_TOGETHER = 8192
"""Small pictures are drawn together until they are so many tokens, which keep a GPU busy; more would only take memory."""


@dataclass(frozen=True)
class Artist:
    """Who draws: a name for the page, the model, and its guidance."""

    name: str
    source: str
    cfg_scale: float


@dataclass(frozen=True)
class Drawn:
    """What an artist drew, one picture or clip for each prompt, as bytes (frames, height, width, 3)."""

    artist: Artist
    num_parameters: int
    """Of its transformer, or of both experts."""
    clips: Sequence[np.ndarray]
    fps: int


def sample_config(config: ReportConfig, run: RunFolder, artist: Artist, prompts: Sequence[str], size: Size) -> SampleConfig:
    """Return what ``sample`` would be given to draw the first prompt as the report does."""
    return SampleConfig(
        model=artist.source,
        prompt=tuple(prompts),
        vae_checkpoint=run.config.vae_checkpoint,
        output=Path("student.png" if size.frames == 1 else "student.mp4"),
        steps=config.steps,
        cfg_scale=artist.cfg_scale,
        sigma_shift=run.config.sigma_shift,
        solver=run.config.solver if config.solver == "auto" else config.solver,
        width=size.width,
        height=size.height,
        frames=size.frames,
        seed=config.seed,
        device=config.device,
    )


def prepare_jobs(
    artists: Sequence[Artist], config: ReportConfig, run: RunFolder, prompts: Sequence[str], size: Size
) -> list[Job]:
    """Check that all of them can draw, before any weights are read."""
    nowhere = config.target.with_suffix(".png" if size.frames == 1 else ".mp4")  # where it could write, and does not
    configs = [sample_config(config, run, artist, prompts, size) for artist in artists]
    return [prepare(replace(each, output=nowhere)) for each in configs]


def draw_all(artists: Sequence[Artist], jobs: Sequence[Job]) -> list[Drawn]:
    """Let one after the other draw; one model is in memory at a time."""
    first = jobs[0]
    monitor = Monitor([first.device])
    with monitor.phase("encoding", "text encoder"):
        # Once: a student reads what its teacher's text encoder writes.
        conditioning = encode(first)
    seeds = [first.config.seed + index for index in range(len(first.prompts))]
    found = []
    for artist, job in zip(artists, jobs, strict=True):
        say(f"{artist.name}: drawing {len(seeds)} prompts with {job.schedule.num_steps} steps of {job.solver}")
        together = max(min(_TOKENS_TOGETHER // job.num_tokens, len(seeds)), 1)
        batch = replace(job, config=replace(job.config, batch_size=together))  # what the placement has to leave room for
        placement = choose_placement(placement_name(job), **placement_options(batch))
        with monitor.phase("denoising", artist.name.lower()):
            latents = denoise(job, conditioning, placement, monitor, seeds, together=together)
        with monitor.phase("decoding", "vae"):
            clips = list(decode(job, latents))
        free_memory(job.device)
        found.append(Drawn(artist, sum(stored.num_parameters for stored in job.transformers), clips, job.fps))
    return found
