"""Where a transformer in training draws: captions and their embeddings, the solver's settings, the VAE for as long."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wandistiller.config.transformer_training import TransformerTrainingConfig
from wandistiller.data.buckets import AllOne, Bucket
from wandistiller.data.encode import place_text_encoder
from wandistiller.data.prompts import open_prompts
from wandistiller.errors import UsageError
from wandistiller.models.channel_adapter import ChannelAdapter
from wandistiller.models.devices import find_dtype, free_memory
from wandistiller.models.latents import denormalise
from wandistiller.models.load import load_model
from wandistiller.models.pipeline import Pipeline
from wandistiller.models.stored import StoredModel
from wandistiller.models.text import encode_prompts
from wandistiller.models.text_padding import TEXT_TOKENS, cut_text, trim_padding
from wandistiller.train.callbacks import Callback
from wandistiller.train.drawing import Drawing
from wandistiller.train.ema import MovingAverage
from wandistiller.train.marks import MeasureMarks
from wandistiller.train.method import Role
from wandistiller.train.runs import Run
from wandistiller.train.samples import DrawSamples

_DEFAULT_SAMPLES = 4
_MOST_AT_ONCE = 64
_MOST_OF_A_FILE = 100
_FPS = 16


def check_drawing(config: TransformerTrainingConfig, pipeline: Pipeline) -> None:
    """Raise ``UsageError`` or ``CheckpointError`` where what is to be drawn could not be; nothing is loaded."""
    if config.uses_solver:
        pipeline.choose_solver(config.solver)
    read_sample_prompts(config.sample_prompts)


def read_sample_prompts(given: Sequence[str]) -> list[str]:
    """Return prompts; the name of a file stands for its lines."""
    found = []
    for each in given:
        if not os.path.isfile(each):  # noqa: PTH113  pathlib raises for a prompt that is too long for a path
            found.append(each)
            continue
        lines = open_prompts(each)
        if len(lines) > _MOST_OF_A_FILE:
            raise UsageError(
                f"--sample-prompts {each} has {len(lines)} prompts.",
                why="all of them are drawn each time.",
                fix=f"Give a file of at most {_MOST_OF_A_FILE} lines.",
            )
        found += [lines.prompt(index) for index in range(len(lines))]
    return found


class Captioned(Protocol):
    """Captions by number, with their embeddings and the shape of what belongs to them."""

    buckets: Sequence[Bucket]
    trims_text: bool
    empty_text: Tensor

    def __len__(self) -> int: ...

    def caption(self, index: int) -> str: ...

    def text(self, index: int) -> Tensor: ...

    def latent_shape(self, index: int) -> tuple[int, int, int, int]: ...


@dataclass(frozen=True, kw_only=True)
class Studio:
    """How pictures are drawn while training."""

    config: TransformerTrainingConfig
    pipeline: Pipeline
    vae: StoredModel
    device: torch.device
    dtype: torch.dtype
    """What the transformer's inputs are in."""
    adapter: ChannelAdapter | None = None
    """For a transformer whose latents have other channels than the VAE's."""
    max_text_tokens: int = TEXT_TOKENS
    """How much of a caption the transformer is given."""

    @property
    def shift(self) -> float:
        return self.config.sigma_shift or self.pipeline.shift or 1.0

    def callbacks(
        self, run: Run, role: Role, samples: Captioned, held_out: Captioned | None, average: MovingAverage | None
    ) -> list[Callback]:
        """Return those that the configuration asks for: marks of a held-out world, and pictures every so often."""
        config = self.config
        found: list[Callback] = []
        if held_out is not None and config.judge_samples:
            drawings = self.draw_captions(held_out, config.judge_samples)
            # Memory is enough to train on as many.
            every, together = config.validate_every, min(config.batch_size, _MOST_AT_ONCE)
            found.append(MeasureMarks(role, drawings, self.decode, run.metrics, every=every, average=average, at_once=together))
        if config.sample_every:
            folder = config.sample_dir or config.output_dir / "samples"
            drawings = self.draw_prompts(samples)
            found.append(DrawSamples(role, drawings, self.decode, folder, fps=_FPS, every=config.sample_every, average=average))
        return found

    def decode(self, latents: Sequence[Tensor]) -> Iterator[Tensor]:
        """Decode samples, each when it is asked for; the VAE is in memory only for as long."""
        vae: Any = load_model(self.vae, dtype=torch.float32, device=self.device)
        for each in latents:
            with torch.no_grad():  # not around the yield: it would hold for whoever asks
                whole = each[None] if self.adapter is None else self.adapter.up(each[None])
                pixels: Tensor = vae.decode(denormalise(whole, self.vae.config), return_dict=False)[0][0].cpu()
            yield pixels

    def draw_prompts(self, samples: Captioned) -> list[Drawing]:
        """Return what is drawn every so often: prompts that were asked for, as long as the data are, or some captions."""
        config = self.config
        if not config.sample_prompts:
            return self._by_size(samples, _some_captions(samples.buckets))
        prompts = read_sample_prompts(config.sample_prompts)
        text = encode_prompts(
            self.pipeline.part("text_encoder"),
            self.pipeline.part("tokenizer"),
            prompts,
            device=self.device,
            dtype=find_dtype(config.dtype, self.device),
            place=lambda encoder: place_text_encoder(encoder, self.device),  # beside what is trained
        ).float()
        free_memory(self.device)
        text = trim_padding(text) if samples.trims_text else text
        shape = samples.latent_shape(_longest(samples.buckets))
        return [self._make(prompts, text, samples.empty_text, shape)]

    def draw_captions(self, samples: Captioned, limit: int) -> list[Drawing]:
        """Return the first captions, those of each size together."""
        return self._by_size(samples, range(min(limit, len(samples))))

    def _by_size(self, samples: Captioned, chosen: Sequence[int]) -> list[Drawing]:
        """Return captions in the shapes of what belongs to them, those of each size together."""
        found: dict[Bucket, list[int]] = {}
        for number, index in enumerate(chosen):
            found.setdefault(samples.buckets[index], []).append(number)
        return [self._drawing(samples, [chosen[number] for number in numbers], numbers) for numbers in found.values()]

    def _drawing(self, samples: Captioned, indices: Sequence[int], numbers: Sequence[int]) -> Drawing:
        text = pad_sequence([samples.text(index) for index in indices], batch_first=True)
        captions, shape = [samples.caption(index) for index in indices], samples.latent_shape(indices[0])
        return self._make(captions, text, samples.empty_text, shape, numbers)

    def _make(
        self,
        prompts: Sequence[str],
        text: Tensor,
        empty_text: Tensor,
        shape: tuple[int, int, int, int],
        numbers: Sequence[int] | None = None,
    ) -> Drawing:
        return Drawing(
            prompts=prompts,
            text=cut_text(text, self.max_text_tokens),
            empty_text=empty_text,
            latent_shape=shape,
            num_steps=self.config.sample_steps,
            shift=self.shift,
            solver=self.pipeline.choose_solver(self.config.solver),
            cfg_scale=self.config.cfg_scale,
            seed=self.config.seed,
            dtype=self.dtype,
            adapter=self.adapter,
            numbers=numbers,
        )


def _some_captions(buckets: Sequence[Bucket]) -> list[int]:
    """Return the first items; where these are all pictures or short clips, the last of them gives way to a longest clip."""
    chosen, longest = list(range(min(_DEFAULT_SAMPLES, len(buckets)))), _longest(buckets)
    if all(buckets[index].frames < buckets[longest].frames for index in chosen):
        chosen[-1] = longest
    return chosen


def _longest(buckets: Sequence[Bucket]) -> int:
    """Return the first item with the most frames and, of those, the most pixels."""
    if isinstance(buckets, AllOne):  # millions of prompts, perhaps
        return 0
    return max(range(len(buckets)), key=lambda index: (buckets[index].frames, buckets[index].height * buckets[index].width))
