"""What the parts beside the transformer take: text encoder and VAE, each in a phase of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.memory.durations import step_seconds
from wandistiller.memory.estimates import Phase, margin
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.placement import StreamPlan, Subject, find_placement
from wandistiller.memory.stage import Stage
from wandistiller.memory.tape import Tape
from wandistiller.memory.tracing import materialise, recording
from wandistiller.models.stored import VAE, build_empty
from wandistiller.models.vae_tiles import TILE, decode_tiled
from wandistiller.units import Bytes


def text_phase(encoder: nn.Module, hardware: Hardware, dtype: torch.dtype, *, is_streamed: bool | None = None) -> Phase:
    """Return the phase in which prompts are encoded: on the card where there is room, else streamed to it.

    ``is_streamed`` says it where it does not follow from the room.
    """
    encoder = encoder.to(dtype)
    stage = Stage("encoding text", hardware)
    sizes = [tensor.nbytes for _, tensor in named_tensors(encoder)]
    working = 2**28  # a few prompts of up to 512 tokens
    if is_streamed is None:
        is_streamed = hardware.card is not None and sum(sizes) + working + margin(sum(sizes)) + 2**30 > hardware.room
    if is_streamed:
        subject = Subject(model=encoder, blocks=list(encoder.get_submodule("encoder.block").children()))
        footprint = find_placement("offload").predict(subject, torch.device("cuda"))
        stage.stream("text encoder", StreamPlan(subject, 2, 0, quantise=False), footprint)
    else:
        stage.scene.hold("text encoder", "weights", sizes)
    stage.scene.hold("text encoder", "activations", [working])
    return stage.finished(sum(sizes) / (hardware.bus_rate if is_streamed else 1e12))


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Latents that become pixels."""

    config: Mapping[str, Any]
    latent_shape: tuple[int, ...]
    dtype: torch.dtype
    is_tiled: bool = False

    def run(self, vae: Any, latents: Tensor) -> None:
        """Decode one sample."""
        if self.is_tiled:
            decode_tiled(vae, latents)
        else:
            vae.decode(latents, return_dict=False)

    def phase(self, hardware: Hardware) -> Phase:
        """Return what it takes."""
        shape, times = self.latent_shape, 1.0
        if self.is_tiled:
            # One tile is like the other, and a frame like the next: three of each are enough, with what is around a tile.
            channels, *sizes = shape
            kept = [min(size, most) for size, most in zip(sizes, (3, 3 * TILE, 3 * TILE), strict=True)]
            shape, times = (channels, *kept), math.prod(sizes) / math.prod(kept)
        found = _vae_phase(
            "decoding",
            self.config,
            shape,
            self.dtype,
            lambda vae: self.run(vae, torch.empty(1, *shape, dtype=self.dtype)),
            hardware,
            is_tiled=self.is_tiled,
        )
        return replace(found, seconds=found.seconds * times, work=self)


def encode_phase(config: Mapping[str, Any], pixel_shape: tuple[int, ...], dtype: torch.dtype, hardware: Hardware) -> Phase:
    """Return the phase in which clips (channels, frames, height, width) become latents."""

    def encode(vae: Any) -> None:
        pixels: Tensor = torch.empty(1, *shape, dtype=dtype)
        vae.encode(pixels, return_dict=False)

    # A clip is encoded four frames at a time, and what grows with it grows evenly: two short ones tell of a long one.
    channels, frames, *size = pixel_shape
    found = []
    for num_frames in (min(frames, 17), min(frames, 25)):
        shape = (channels, num_frames, *size)
        found.append(_vae_phase("encoding media", config, shape, dtype, encode, hardware))
    return found[1] if frames <= 25 else extended(found[0], found[1], (frames - 17) / 8)


def extended(shorter: Phase, longer: Phase, times: float) -> Phase:
    """Return a phase that is ``times`` as much larger than one as another is."""

    def extend(low: float, high: float) -> float:
        return low + times * (high - low)

    return replace(
        longer,
        peak=Bytes(round(extend(shorter.peak, longer.peak))),
        reserved=Bytes(round(extend(shorter.reserved, longer.reserved))),
        seconds=extend(shorter.seconds, longer.seconds),
    )


_phases: dict[Hashable, Phase] = {}


def _vae_phase(
    name: str,
    config: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    run: Callable[[nn.Module], None],
    hardware: Hardware,
    *,
    is_tiled: bool = False,
) -> Phase:
    key = (name, str(sorted(config.items())), shape, dtype, is_tiled, hardware.card)
    if key not in _phases:
        empty = build_empty(VAE, config, dtype=dtype).requires_grad_(False)
        sizes = [tensor.nbytes for _, tensor in named_tensors(empty)]
        tape = record_once(empty, run)
        stage = Stage(name, hardware)
        stage.scene.hold("vae", "weights", sizes)
        stage.scene.drop(stage.play_tape("vae", tape))
        _phases[key] = stage.finished(step_seconds(tape, {}, hardware).total)
    return _phases[key]


def record_once(empty: nn.Module, run: Callable[[nn.Module], None]) -> Tape:
    """Write down one pass of a model that is not the same block many times over."""
    with recording() as recorder:
        model = materialise(recorder, empty)
        with torch.no_grad():
            run(model)
    return recorder.tape
