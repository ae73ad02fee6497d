"""What the parts beside the transformer take: text encoder and VAE, each in a phase of its own."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.errors import UsageError
from wandistiller.memory.auto import choose
from wandistiller.memory.durations import step_seconds, streamed
from wandistiller.memory.estimates import HOST_SHARE, Item, Phase, by_kind, most_that_fits
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.placement import StreamPlan, Subject, find_placement
from wandistiller.memory.scene import Scene
from wandistiller.memory.stage import Stage
from wandistiller.memory.tape import Tape
from wandistiller.memory.tracing import materialise, recording
from wandistiller.models.stored import VAE, build_empty
from wandistiller.models.vae_tiles import TILE, decode_tiled, encode_tiled
from wandistiller.units import Bytes

_CUDA = torch.device("cuda")
TEXT_ROOM = Bytes(2**30)
"""What is left free on a card beside the text encoder's weights, for what it computes with and for what is there already."""
_TEXT_TOKENS = 512
CLIP_TOKENS = (224 // 14) ** 2 + 1
"""What CLIP's ViT-H sees of a picture: its patches, and one for the whole."""


@dataclass(frozen=True, kw_only=True)
class TextEncoding:
    """A prompt, as long as one can be, that becomes embeddings."""

    encoder: nn.Module
    """On the meta device."""
    placing: str
    resident: int = 0

    @property
    def subject(self) -> Subject:
        return Subject(model=self.encoder, blocks=list(self.encoder.get_submodule("encoder.block").children()))

    def run(self, encoder: Any, device: torch.device) -> None:
        """Encode one prompt."""
        ids, mask = (make(1, _TEXT_TOKENS, dtype=torch.long, device=device) for make in (torch.zeros, torch.ones))
        encoder(ids, mask)

    def phase(self, hardware: Hardware) -> Phase:
        """Return what it takes."""
        stage, subject = Stage("encoding text", hardware), self.subject
        sizes = [tensor.nbytes for _, tensor in named_tensors(self.encoder)]
        seconds = step_seconds(self._tape, {}, hardware if self.placing != "cpu" else replace(hardware, card=None))
        if self.placing == "offload":
            plan = StreamPlan(subject, 2, self.resident, quantise=False)
            stage.stream("text encoder", plan, find_placement("offload", resident=self.resident).predict(subject, _CUDA))
            seconds = streamed(seconds, plan.ring, plan.moved_bytes / hardware.bus_rate)
        elif self.placing == "cpu":
            stage.add("text encoder", "weights", "host", sum(sizes))
            stage.add("text encoder", "working memory", "host", Scene().play(self._tape, {}).peak)
        else:
            stage.scene.hold("text encoder", "weights", sizes)
        if self.placing != "cpu":
            stage.scene.drop(stage.play_tape("text encoder", self._tape))
        return replace(stage.finished(seconds.total), work=self)

    @property
    def _tape(self) -> Tape:
        dtype = next(self.encoder.parameters()).dtype
        key = ("text", self.encoder.config.to_json_string(), dtype)
        if key not in _tapes:
            _tapes[key] = record_once(copy.deepcopy(self.encoder), lambda encoder: self.run(encoder, torch.device("cpu")))
        return _tapes[key]


@functools.lru_cache(maxsize=4)
def text_phase(
    encoder: nn.Module, hardware: Hardware, dtype: torch.dtype, *, placing: str | None = None, ranks: int = 1
) -> Phase:
    """Return the phase in which prompts are encoded, by so many ranks of a machine: on the card where there is room, else
    streamed to it.

    ``placing`` says where, if that does not follow from the room: gpu, offload or cpu.
    """
    if next(encoder.parameters()).dtype != dtype:
        encoder = copy.deepcopy(encoder).to(dtype)
    work = TextEncoding(encoder=encoder.eval(), placing=placing or "gpu")
    if placing is None and hardware.card is not None:
        room = Bytes(max(most_that_fits(hardware.room) - TEXT_ROOM, 0))
        host = Bytes(int(hardware.host_memory * HOST_SHARE))
        try:
            choice = choose(work.subject, _CUDA, room, host, ranks)
        except UsageError:  # too little of everything
            return replace(work, placing="offload").phase(hardware)
        work = replace(work, placing=choice.name, resident=getattr(choice.placement, "resident", 0))
    return work.phase(hardware)


def clip_phase(hardware: Hardware) -> Phase:
    """Return the phase in which Wan's image encoder, CLIP's ViT-H in float32, looks at a picture."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    def empty() -> nn.Module:
        sizes = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
        with torch.device("meta"):
            found: nn.Module = CLIPVisionModel(CLIPVisionConfig(**sizes, patch_size=14))
        return found.requires_grad_(False)

    def look(model: nn.Module) -> None:
        model(pixel_values=torch.empty(1, 3, 224, 224), output_hidden_states=True)

    return _Pass("clip", "image encoder", empty, look).phase("looking at the picture", hardware)


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

    @property
    def weights(self) -> list[int]:
        """Bytes of each of the VAE's tensors."""
        return [tensor.nbytes for _, tensor in named_tensors(self._empty())]

    @property
    def _kept_shape(self) -> tuple[int, ...]:
        """What tells of all latents: one tile is like the other, and a frame like the next, so three of each are enough."""
        if not self.is_tiled:
            return self.latent_shape
        channels, frames, *sides = self.latent_shape
        counts = [-(-side // TILE) for side in sides]  # tiles as few as possible, and as large as each other
        kept = (side if count <= 3 else 3 * -(-side // count) for side, count in zip(sides, counts, strict=True))
        return (channels, min(frames, 3), *kept)

    @property
    def tape(self) -> Tape:
        """The decoding of one sample, or of as much as tells of all."""
        return self._pass.tape

    def phase(self, hardware: Hardware) -> Phase:
        """Return what it takes."""
        times = math.prod(self.latent_shape) / math.prod(self._kept_shape)
        return replace(self._pass.phase("decoding", hardware, times), work=self)

    @property
    def _pass(self) -> _Pass:
        shape = self._kept_shape
        key = ("decode", str(sorted(self.config.items())), shape, self.dtype, self.is_tiled)
        return _Pass(key, "vae", self._empty, lambda vae: self.run(vae, torch.empty(1, *shape, dtype=self.dtype)))

    def _empty(self) -> nn.Module:
        return build_empty(VAE, self.config, dtype=self.dtype).requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Pixels that become latents."""

    config: Mapping[str, Any]
    pixel_shape: tuple[int, ...]
    """Channels, frames, height, width."""
    dtype: torch.dtype
    is_tiled: bool = False

    def run(self, vae: Any, pixels: Tensor) -> None:
        """Encode one sample."""
        if self.is_tiled:
            encode_tiled(vae, pixels)
        else:
            vae.encode(pixels, return_dict=False)

    def phase(self, hardware: Hardware, name: str = "encoding media") -> Phase:
        """Return what it takes."""
        # A clip is encoded four frames at a time, and what grows with it grows evenly: two short ones tell of a long one.
        # (Tiles take long to follow, and leave few fragments.)
        frames, few = self.pixel_shape[1], 17 if self.is_tiled else 25
        shorter, longer = (self._phase(hardware, name, min(frames, most)) for most in (few, few + 8))
        found = longer if frames <= few + 8 else extended(shorter, longer, (frames - few) / 8)
        return replace(found, work=self)

    def _phase(self, hardware: Hardware, name: str, frames: int) -> Phase:
        channels, _, *size = self.pixel_shape
        shape = (channels, frames, *size)

        def empty() -> nn.Module:
            return build_empty(VAE, self.config, dtype=self.dtype).requires_grad_(False)

        def encode(vae: nn.Module) -> None:
            self.run(vae, torch.empty(1, *shape, dtype=self.dtype))

        key = ("encode", str(sorted(self.config.items())), shape, self.dtype, self.is_tiled)
        return _Pass(key, "vae", empty, encode).phase(name, hardware)


def extended(shorter: Phase, longer: Phase, times: float) -> Phase:
    """Return a phase that is ``times`` as much larger than one as another is; its fragments are the other's."""

    def extend(low: float, high: float) -> float:
        return low + times * (high - low)

    before = by_kind(shorter.items)
    items = []
    for key, item in by_kind(longer.items).items():
        sizes = zip(_sizes(before.get(key)), _sizes(item), strict=True)
        size, at_peak = (Bytes(round(extend(low, high))) for low, high in sizes)
        items.append(replace(item, size=size, at_peak=at_peak))
    return replace(
        longer,
        items=tuple(items),
        peak=Bytes(round(extend(shorter.peak, longer.peak))),
        passing=Bytes(round(extend(shorter.passing, longer.passing))),
        reserved=Bytes(round(extend(longer.reserved - longer.peak + shorter.peak, longer.reserved))),
        seconds=extend(shorter.seconds, longer.seconds),
    )


def _sizes(item: Item | None) -> tuple[int, int]:
    return (0, 0) if item is None else (item.size, item.at_peak or 0)


_tapes: dict[Hashable, Tape] = {}
_phases: dict[Hashable, Phase] = {}


@dataclass(frozen=True)
class _Pass:
    """One pass of an encoder or decoder, written down once for all that are alike."""

    key: Hashable
    role: str
    empty: Callable[[], nn.Module]
    run: Callable[[nn.Module], None]

    @property
    def tape(self) -> Tape:
        if self.key not in _tapes:
            _tapes[self.key] = record_once(self.empty(), self.run)
        return _tapes[self.key]

    def phase(self, name: str, hardware: Hardware, times: float = 1.0) -> Phase:
        """Return the phase of one that takes so many times as long."""
        key = (self.key, name, hardware.card, times)
        if key not in _phases:
            stage = Stage(name, hardware)
            stage.scene.hold(self.role, "weights", [tensor.nbytes for _, tensor in named_tensors(self.empty())])
            stage.scene.drop(stage.play_tape(self.role, self.tape))
            _phases[key] = stage.finished(step_seconds(self.tape, {}, hardware).total * times)
        return _phases[key]


def record_once(empty: nn.Module, run: Callable[[nn.Module], None]) -> Tape:
    """Write down one pass of a model that is not the same block many times over."""
    with recording() as recorder:
        model = materialise(recorder, empty)
        with torch.no_grad():
            run(model)
    return recorder.tape
