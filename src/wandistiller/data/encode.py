"""The job of ``wandistiller encode``: look at everything, then text embeddings, then latents.

The text encoder is gone before the VAE is loaded, and each is loaded only if something is missing. Memory does not grow with
the data set. Any number of processes may work at once, under torchrun or not, as long as all have the same sizes and models:
each claims what it is about to encode, and what is written appears whole. They wait for each other's claims at the end and for
nothing else, so when one of them is done the caches are complete.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from wandistiller.config.encode import EncodeConfig
from wandistiller.data.buckets import Bucket
from wandistiller.data.claims import share
from wandistiller.data.encode_job import EncodeJob, prepare_encoding
from wandistiller.data.media_files import BadItem
from wandistiller.data.text_cache import EMPTY_NAME, entry
from wandistiller.distributed.ranks import read_ranks
from wandistiller.errors import MediaError, OutputError
from wandistiller.files import check_can_write
from wandistiller.memory.advice import Remedy
from wandistiller.memory.encoder_phases import TEXT_ROOM
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.out_of_memory import Failure
from wandistiller.memory.placement import Subject
from wandistiller.memory.subjects import choose_placement
from wandistiller.models.devices import free_memory
from wandistiller.models.latents import normalise
from wandistiller.models.load import load_model
from wandistiller.models.text import open_text_encoder
from wandistiller.models.vae_tiles import TILE, encode_tiled
from wandistiller.terminal import Advance, progress, say
from wandistiller.units import Bytes

_READERS = 4


@dataclass(frozen=True)
class Encoded:
    """What was done: files written by this process, files that were up to date, and what was left out."""

    num_text: int
    num_latents: int
    reused: int
    skipped: tuple[BadItem, ...]
    """All that was left out, under names or, where it never became an item, paths."""
    unreadable: tuple[BadItem, ...]
    """Of these, the items that turned out not to be readable."""
    cache_dir: Path


def run_encode(config: EncodeConfig) -> Encoded:
    """Do the whole job; when it returns, everything but what was skipped is in the caches."""
    job = prepare_encoding(config)
    with job.using_caches():
        return fill_caches(job)


def fill_caches(job: EncodeJob) -> Encoded:
    """Encode what is missing or stale; whoever calls it is using the caches (see ``EncodeJob.using_caches``)."""
    monitor = Monitor([job.device], lambda failure: _find_remedies(job, failure))
    try:
        num_text = _encode_texts(job, monitor)
        free_memory(job.device)  # here, where nothing refers to the encoder any more
        num_latents, unreadable = _encode_media(job, monitor)
        free_memory(job.device)
    finally:
        job.claims.release_all()
    skipped = (*job.bad, *unreadable)
    reused = job.num_texts - num_text + job.num_media - num_latents - len(unreadable)
    for item in skipped:
        _note(f"Left out {item}")
    _note(f"Wrote {num_text} text embeddings and {num_latents} latents to {job.texts.folder}; {reused} files were there")
    if job.device.type != "cpu":
        _note("Memory by phase: " + "; ".join(monitor.summary()))
    return Encoded(num_text, num_latents, reused, skipped, tuple(unreadable), job.texts.folder)


def _encode_texts(job: EncodeJob, monitor: Monitor) -> int:
    """Encode the captions that are missing; return how many this process has encoded."""
    missing = _list(job, "captions", job.num_texts, job.texts.missing(job.source))
    if not missing:
        return 0
    num_written = 0

    def claim_name(index: int) -> str:
        return f"text {EMPTY_NAME if index < 0 else job.source.name(index)}"

    parts = job.pipeline.part("text_encoder"), job.pipeline.part("tokenizer")
    options = {"device": job.device, "dtype": job.dtype, "place": lambda encoder: place_text_encoder(encoder, job.device)}
    with (
        monitor.phase("encoding captions", "text encoder"),
        open_text_encoder(*parts, **options) as encode,
        _bar("Captions", len(missing), monitor) as advance,
    ):

        def work(claimed: Iterator[int]) -> None:
            nonlocal num_written
            while batch := list(itertools.islice(claimed, job.config.text_batch_size)):
                entries = [entry(job.source, index) for index in batch]
                found = encode([caption for _, caption in entries])
                with _one_thread():
                    for index, (name, caption), embeddings in zip(batch, entries, found, strict=True):
                        check_finite(embeddings, job.texts.file(name).path, "--dtype")
                        job.texts.write(name, caption, embeddings, encoder_path=str(parts[0]))
                        job.claims.release(claim_name(index))
                        num_written += 1
                        advance()

        share(
            sorted(missing, key=_is_others),
            job.claims,
            claim_name,
            lambda index: job.texts.problem(*entry(job.source, index)) is None,
            work,
            advance,
        )
    return num_written


def _encode_media(job: EncodeJob, monitor: Monitor) -> tuple[int, list[BadItem]]:
    """Encode the media that are missing; return how many this process has encoded, and what could not be read."""
    missing = _list(job, "media", job.num_media, job.latents.missing(job.source, job.buckets))
    if os.access(job.latents.folder, os.W_OK):
        for index in set(range(len(job.source))).difference(missing):
            if job.buckets[index] is not None:
                job.latents.remember_stamp(job.source, index)
    if not missing:
        return 0, []
    with monitor.phase("encoding media", "vae"):
        vae = load_model(job.vae, dtype=job.vae_dtype, device=job.device)
        with _bar("Media", len(missing), monitor) as advance:
            encoding = _MediaEncoding(job, vae, advance)
            share(
                sorted(missing, key=lambda index: (_is_others(index), job.buckets[index], index)),
                job.claims,
                encoding.claim_name,
                encoding.is_done,
                encoding.work,
                advance,
            )
    return encoding.num_written, encoding.unreadable


@dataclass(frozen=True)
class _Loaded:
    """Media as they were read."""

    stamp: str
    media: str
    frames: np.ndarray


class _MediaEncoding:
    """Media read ahead by threads, encoded in batches of one bucket, and written."""

    def __init__(self, job: EncodeJob, vae: nn.Module, advance: Advance) -> None:
        self.num_written = 0
        self.unreadable: list[BadItem] = []
        self._job = job
        self._vae = vae
        self._advance = advance

    def claim_name(self, index: int) -> str:
        return f"latent {self._job.source.name(index)}"

    def is_done(self, index: int) -> bool:
        return self._job.latents.problem(self._job.source, index, self._bucket(index)) is None

    def work(self, claimed: Iterator[int]) -> None:
        """Encode what has been claimed; only a few items more than a batch are in memory."""
        queue: deque[tuple[int, Future[_Loaded]]] = deque()
        pool = ThreadPoolExecutor(_READERS)
        try:
            for index in claimed:
                queue.append((index, pool.submit(self._read, index)))
                if len(queue) == self._job.batch_size(self._bucket(queue[0][0])) + _READERS:
                    self._encode_first(queue)
            while queue:
                self._encode_first(queue)
        finally:
            pool.shutdown(cancel_futures=True)

    def _bucket(self, index: int) -> Bucket:
        bucket = self._job.buckets[index]
        assert bucket is not None  # what has none is never missing
        return bucket

    def _read(self, index: int) -> _Loaded:
        source = self._job.source
        return _Loaded(source.stamp(index), source.fingerprint(index), source.read(index, self._bucket(index)))

    def _encode_first(self, queue: deque[tuple[int, Future[_Loaded]]]) -> None:
        """Encode and write the items at the head of the queue that can be one batch."""
        job, bucket = self._job, self._bucket(queue[0][0])
        batch: dict[int, _Loaded] = {}
        while queue and len(batch) < job.batch_size(bucket) and self._bucket(queue[0][0]) == bucket:
            index, reading = queue.popleft()
            try:
                batch[index] = reading.result()
            except MediaError as error:
                if not job.config.skip_bad:
                    raise MediaError(error.what, why=error.why, fix=f"{error.fix} --skip-bad goes on without it.") from error
                self.unreadable.append(BadItem(job.source.name(index), error.what.rstrip(".")))
                self._finish(index)
        if not batch:
            return
        frames = np.stack([loaded.frames for loaded in batch.values()])
        latents = encode_frames(self._vae, frames, tiled=job.config.vae_tiling)
        with _one_thread():
            self._write(bucket, batch, latents.cpu())

    def _write(self, bucket: Bucket, batch: Mapping[int, _Loaded], latents: Tensor) -> None:
        job = self._job
        for (index, loaded), values in zip(batch.items(), latents, strict=True):
            name = job.source.name(index)
            check_finite(values, job.latents.file(name).path, "--vae-dtype")
            job.latents.write(
                name,
                bucket,
                values,
                stamp=loaded.stamp,
                media=loaded.media,
                vae_path=str(job.vae.weights.path),
                vae_dtype=job.vae_dtype,
                tiled=job.config.vae_tiling,
            )
            self.num_written += 1
            self._finish(index)

    def _finish(self, index: int) -> None:
        self._job.claims.release(self.claim_name(index))
        self._advance()


@torch.no_grad()
def encode_frames(vae: nn.Module, frames: np.ndarray, *, tiled: bool = False) -> Tensor:
    """Return the normalised latents (batch, channels, frames, height, width) of bytes (batch, frames, height, width, 3).

    The most probable latents rather than random ones, in float32, on the VAE's device.
    """
    parameter = next(vae.parameters())
    pixels = torch.from_numpy(frames).to("cpu" if tiled else parameter.device).permute(0, 4, 1, 2, 3)
    # In the order of diffusers' own preprocessing, which is not the same to the last bit in another one.
    pixels = (2.0 * (pixels.float() / 255) - 1.0).to(parameter.dtype)
    distribution = encode_tiled(vae, pixels) if tiled else vae.encode(pixels).latent_dist
    return normalise(distribution.mode().float(), vae.config)


def place_text_encoder(encoder: nn.Module, device: torch.device) -> None:
    """Put the encoder where there is room for it."""
    if device.type == "cpu":
        return
    blocks = list(encoder.get_submodule("encoder.block"))
    choose_placement("auto", headroom=TEXT_ROOM).attach(Subject(model=encoder, blocks=blocks), device)


def _find_remedies(job: EncodeJob, failure: Failure) -> list[Remedy]:
    """Return what the flags of ``encode`` can do about a failure."""
    if not failure.is_computing or failure.role != "vae":
        return []
    held = failure.in_use + (failure.asked or 0)
    largest = max((bucket for bucket in job.buckets if bucket is not None), key=lambda each: each.height * each.width)
    area, num_together = largest.height * largest.width, job.batch_size(largest)
    found = []
    if num_together > 1:
        found.append(Remedy(changes={"batch_size": 1}, saves=Bytes(held * (num_together - 1) // num_together), slowdown=1.2))
    tile_area = (TILE * job.vae.config["scale_factor_spatial"]) ** 2
    if not job.config.vae_tiling and area > tile_area:
        found.append(Remedy(changes={"vae_tiling": True}, saves=Bytes(round(held * (1 - tile_area / area))), slowdown=1.8))
    if job.vae_dtype.itemsize == 4:
        found.append(Remedy(changes={"vae_dtype": "bfloat16"}, saves=Bytes(held // 2), slowdown=0.7, why="a small loss"))
    return found


def _is_others(index: int) -> bool:
    """Say whether another rank begins with this item; each begins with its own and then helps the others."""
    ranks = read_ranks()
    return index % ranks.world_size != ranks.rank


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let one thread do what is small: those of several processes on the same cores would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_finite(values: Tensor, path: Path, flag: str) -> None:
    """Raise ``OutputError`` rather than let a cache hold numbers that are not finite."""
    if not torch.isfinite(values).all():
        raise OutputError(
            f"{path} would hold numbers that are not finite.",
            why="the weights hold such numbers, or the precision is too small for this model.",
            fix=f"Try {flag} float32; if it stays, the checkpoint is damaged.",
        )


def _list(job: EncodeJob, what: str, total: int, missing: Iterator[tuple[int, str]]) -> list[int]:
    """Return what there is to do, and say how much that is and, for what is there but stale, why."""
    indices, num_stale, example = [], 0, ""
    for index, problem in missing:
        indices.append(index)
        if not problem.endswith("does not exist"):
            num_stale += 1
            example = example or problem
    stale = f"; {num_stale} are stale, such as: {example}" if num_stale else ""
    _note(f"{total} {what}, {len(indices)} to encode{stale}")
    if indices:  # a complete cache may lie where nothing can be written
        check_can_write(job.texts.file(EMPTY_NAME).path)
    return indices


def _bar(description: str, total: int, monitor: Monitor) -> AbstractContextManager[Advance]:
    if not read_ranks().is_first:
        return nullcontext(lambda amount=1: None)
    note, read_at = "", 0.0

    def line() -> str:
        # Asking the driver takes as long as encoding a small picture.
        nonlocal note, read_at
        if time.monotonic() > read_at + 0.5:
            note, read_at = monitor.line(), time.monotonic()
        return note

    return progress(description, total, "item", line)


def _note(message: str) -> None:
    if read_ranks().is_first:
        say(message)
