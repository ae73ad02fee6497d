"""Text embeddings of prompts on disk, so that the text encoder is gone before a teacher is loaded.

``ensure`` encodes what a run will need and no more, one part of the prompts after the other: it would take a minute and
gigabytes to know of ten million which are there before the first is encoded. Any number of processes may do that at once: they
share the work, and each ends when all is there. What is on disk is found by the hash of a prompt under the text encoder's
fingerprint and precision. So a changed file of prompts costs only what has changed, another encoder has its own embeddings, and
a run that was killed goes on from its last shard.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wandistiller.data.claims import Claims, share
from wandistiller.data.encode import check_finite, place_text_encoder
from wandistiller.data.encode_job import sweep_partial
from wandistiller.data.prompts import Prompts
from wandistiller.data.text_cache import fingerprint_text_encoder, without_padding
from wandistiller.data.text_shards import KEY_BYTES, Keys, TextShards, key_of, make_keys
from wandistiller.distributed.ranks import read_ranks
from wandistiller.errors import CheckpointError, OutputError, UsageError
from wandistiller.files import check_can_write
from wandistiller.models.devices import free_memory
from wandistiller.models.text import EncodeTexts, count_tokens, open_text_encoder, pad_embeddings
from wandistiller.models.text_padding import trim_padding
from wandistiller.terminal import Advance, progress, say
from wandistiller.units import Bytes

EMPTY = -1
"""Stands for the empty prompt among the numbers of prompts."""

# A shard is written when it has so many prompts or bytes, or when so much work would be lost by a kill.
_SHARD_PROMPTS = 1024
_SHARD_BYTES = 128 * 2**20
_SHARD_SECONDS = 60.0
# Few enough that several processes have something to do.
_CLAIMED_PROMPTS = 64
_COUNTED_PROMPTS = 2048
_PART_PROMPTS = 2**16
_SAMPLING_MARGIN = 1.1


@dataclass(frozen=True)
class TextPlan:
    """What there is to do: different prompts (the empty one is one), those without embeddings, and their bytes on disk."""

    num_prompts: int
    num_missing: int
    num_bytes: Bytes
    is_exact: bool
    """False if the bytes follow from a sample of the prompts; of very many prompts all numbers do."""


class PromptTexts:
    """The embeddings of prompts, by number."""

    def __init__(
        self,
        prompts: Prompts,
        folder: Path,
        *,
        text_encoder: Path,
        tokenizer: Path,
        dtype: torch.dtype,
        trims_text: bool = False,
    ) -> None:
        """``folder`` is for caches of any kind; ``trims_text`` leaves the padding away (see ``models.text_padding``).

        Nothing is loaded. Raises ``CheckpointError`` for an encoder that cannot be read.
        """
        encoder = fingerprint_text_encoder(text_encoder, tokenizer)
        name = f"{encoder[:16]}-{str(dtype).removeprefix('torch.')}"
        self.prompts = prompts
        self.trims_text = trims_text
        self.width = _read_width(text_encoder)
        self._parts = text_encoder, tokenizer
        self._dtype = dtype
        self._shards = TextShards(folder / "prompts" / name, encoder=encoder, dtype=dtype)
        self._shards.refresh()

    @property
    def folder(self) -> Path:
        """Where the embeddings of this encoder and precision are."""
        return self._shards.folder

    def read(self, index: int) -> Tensor:
        """Return a prompt's embeddings (512, width), or fewer tokens without padding, in float32; -1 is the empty prompt."""
        stored = self._shards.read(key_of(self._text(index)))
        if stored is None:
            name = "The empty prompt" if index == EMPTY else self.prompts.name(index)
            raise CheckpointError(
                f"{name} has no text embeddings in {self.folder}.",
                why="the prompt has changed, or the cache was removed.",
                fix="Start again; what is missing is encoded then.",
            )
        text = pad_embeddings(stored, self.width, self.folder, "embeddings")[0]
        return trim_padding(text).contiguous() if self.trims_text else text

    @functools.cached_property
    def empty_text(self) -> Tensor:
        """The embeddings of the empty prompt, as ``read`` gives them; ``ensure`` always encodes it."""
        return self.read(EMPTY)

    def plan(self, indices: Sequence[int]) -> TextPlan:
        """Say what ``ensure`` would do; at most the tokenizer is loaded."""
        self._shards.refresh()
        return self._plan(indices)

    def ensure(self, indices: Sequence[int], *, device: torch.device, batch_size: int = 8) -> TextPlan:
        """Encode those of the prompts that have no embeddings yet, and return what there was to do.

        The encoder is loaded only for that and gone afterwards. Raises ``UsageError``, before, if the disk has no room.
        """
        self._remove_bad()
        plan = self._plan(indices)
        is_large = len(indices) > _PART_PROMPTS
        if not plan.num_missing and not is_large:
            return plan
        self._check_room(plan)
        _note(
            f"{'About ' if is_large else ''}{plan.num_prompts} different prompts, {plan.num_missing} to encode: "
            f"{'' if plan.is_exact else 'about '}{plan.num_bytes} in {self.folder}"
        )
        self._encode(indices, plan, device, batch_size)
        free_memory(device)  # here, where nothing refers to the encoder any more
        return plan

    def _encode(self, indices: Sequence[int], plan: TextPlan, device: torch.device, batch_size: int) -> None:
        def place(encoder: nn.Module) -> None:
            place_text_encoder(encoder, device)

        is_large = len(indices) > _PART_PROMPTS
        total = len(indices) if is_large else plan.num_missing
        bar = progress("Prompts", total, "prompt") if read_ranks().is_first else nullcontext(lambda amount=1: None)
        claims = Claims(self.folder / ".claims")
        with ExitStack() as ends:
            ends.callback(claims.release_all)
            encode: EncodeTexts | None = None
            advance = ends.enter_context(bar)
            for start in range(0, max(len(indices), 1), _PART_PROMPTS):
                part = indices[start : start + _PART_PROMPTS]
                wanted = self._want(part)
                num_missing = len(wanted.keys) - int(self._shards.has(wanted.keys).sum())
                if num_missing:
                    if is_large:  # what was said of all is no more than a guess
                        self._check_room(self._plan(part))
                    if encode is None:
                        opened = open_text_encoder(*self._parts, device=device, dtype=self._dtype, place=place)
                        encode = ends.enter_context(opened)
                    self._encode_part(_Encoding(self, wanted, claims, encode, advance, batch_size))
                if is_large:
                    advance(max(len(part) - num_missing, 0))
                if not self._shards.has(wanted.keys).all():
                    advice = "Start again, and let nothing remove them."
                    raise OutputError(f"Text embeddings have gone from {self.folder}.", fix=advice)

    def _encode_part(self, encoding: _Encoding) -> None:
        ranks = read_ranks()
        # Each rank begins with its own and then helps the others.
        order = sorted(encoding.missing, key=lambda group: group % ranks.world_size != ranks.rank)
        share(order, encoding.claims, encoding.claim_name, encoding.is_done, encoding.work, lambda: None)

    def _text(self, index: int) -> str:
        return "" if index == EMPTY else self.prompts.prompt(index)

    def _want(self, indices: Iterable[int]) -> _Wanted:
        numbers = np.unique(np.append(np.fromiter(indices, np.int64), EMPTY))
        keys = make_keys([key_of(self._text(index)) for index in numbers.tolist()])
        keys, first = np.unique(keys, return_index=True)
        return _Wanted(keys, numbers[first])

    def _plan(self, indices: Sequence[int]) -> TextPlan:
        if len(indices) > _PART_PROMPTS:
            return self._guess(indices)
        wanted = self._want(indices)
        missing = wanted.indices[~self._shards.has(wanted.keys)]
        if not len(missing):
            return TextPlan(len(wanted.keys), 0, Bytes(0), is_exact=True)
        is_exact = len(missing) <= _COUNTED_PROMPTS
        places = np.arange(len(missing)) if is_exact else np.linspace(0, len(missing) - 1, _COUNTED_PROMPTS).astype(np.int64)
        lengths = count_tokens(self._parts[1], [self._text(index) for index in missing[places].tolist()])
        per_prompt = sum(lengths) / len(lengths) * self.width * self._dtype.itemsize + KEY_BYTES + 8
        return TextPlan(len(wanted.keys), len(missing), Bytes(round(per_prompt * len(missing))), is_exact)

    def _guess(self, indices: Sequence[int]) -> TextPlan:
        """Return what follows from prompts that are evenly spread over very many."""
        some = [indices[place] for place in np.linspace(0, len(indices) - 1, _COUNTED_PROMPTS).astype(np.int64).tolist()]
        keys, counts = np.unique(make_keys([key_of(self._text(index)) for index in some]), return_counts=True)
        # Of n different prompts that are as frequent as each other, one pair in n is of the same; none seen, none assumed.
        num_same, num_pairs = int((counts * (counts - 1)).sum()), len(some) * (len(some) - 1)
        num_different = min(len(indices), num_pairs // num_same) if num_same else len(indices)
        share, found = float((~self._shards.has(keys)).mean()), self._plan(some)
        num_missing = round(share * num_different)
        each = found.num_bytes / max(found.num_missing, 1)
        return TextPlan(num_different, num_missing, Bytes(round(each * num_missing)), is_exact=False)

    def _check_room(self, plan: TextPlan) -> None:
        check_can_write(self.folder / "any")
        place = self.folder
        while not place.exists():
            place = place.parent
        free = Bytes(shutil.disk_usage(place).free)
        if plan.num_bytes * (1.0 if plan.is_exact else _SAMPLING_MARGIN) > free:
            about = "" if plan.is_exact else "about "
            raise UsageError(
                f"The text embeddings of {plan.num_missing} prompts need {about}{plan.num_bytes}; the disk has {free} free.",
                why=f"they are kept in {self.folder}, so that the text encoder need not stay in memory.",
                fix="Free some space, choose another --cache-dir, or use fewer prompts or steps.",
            )

    def _remove_bad(self) -> None:
        """Remove what could not be used, so that it is made again."""
        for shard in self._shards.refresh():
            _note(f"{shard.path} is made again: {shard.reason.rstrip('.')}")
            try:
                shard.path.unlink(missing_ok=True)
            except OSError as error:
                raise OutputError(f"{shard.path} cannot be removed.", why=str(error), fix="Remove it by hand.") from error
        sweep_partial(self.folder)


@dataclass(frozen=True)
class _Wanted:
    """Different prompts in the order of their keys, each with one of its numbers."""

    keys: Keys
    indices: NDArray[np.int64]


class _Encoding:
    """Groups of prompts encoded and gathered into shards."""

    def __init__(
        self, texts: PromptTexts, wanted: _Wanted, claims: Claims, encode: EncodeTexts, advance: Advance, batch_size: int
    ) -> None:
        self._texts = texts
        self._shards = texts._shards
        self._wanted = wanted
        self.claims = claims
        self._encode = encode
        self._advance = advance
        self._batch_size = batch_size
        # Of all that is wanted rather than of what is missing: so they are the same for processes that begin at other times.
        groups = np.arange(len(wanted.keys)) // _CLAIMED_PROMPTS
        found, counts = np.unique(groups[~self._shards.has(wanted.keys)], return_counts=True)
        self.missing = dict(zip(found.tolist(), counts.tolist(), strict=True))
        self._keys: list[bytes] = []
        self._embeddings: list[Tensor] = []
        self._finished: list[int] = []
        self._written_at = time.monotonic()

    def claim_name(self, group: int) -> str:
        return f"prompts {self._part(self._wanted.keys, group).tobytes().hex()}"

    def is_done(self, group: int) -> bool:
        self._shards.refresh()
        done = bool(self._shards.has(self._part(self._wanted.keys, group)).all())
        if done:
            self._advance(self.missing[group])
        return done

    def work(self, claimed: Iterator[int]) -> None:
        """Encode what has been claimed; little more than a shard is in memory."""
        self._written_at = time.monotonic()
        for group in claimed:
            keys, indices = self._part(self._wanted.keys, group), self._part(self._wanted.indices, group)
            missing = indices[~self._shards.has(keys)].tolist()
            # Others may have done a part of it.
            self._advance(self.missing[group] - len(missing))
            for start in range(0, len(missing), self._batch_size):
                self._encode_some(missing[start : start + self._batch_size])
            self._finished.append(group)
        self._write()

    def _encode_some(self, indices: list[int]) -> None:
        texts = [self._texts._text(index) for index in indices]
        for text, embeddings in zip(texts, self._encode(texts), strict=True):
            check_finite(embeddings, self._shards.folder, "--dtype")
            self._keys.append(key_of(text))
            self._embeddings.append(without_padding(embeddings).clone())
            self._advance()
        num_bytes = sum(each.nbytes for each in self._embeddings)
        is_late = time.monotonic() > self._written_at + _SHARD_SECONDS
        if len(self._keys) >= _SHARD_PROMPTS or num_bytes >= _SHARD_BYTES or is_late:
            self._write()

    def _write(self) -> None:
        if self._keys:
            self._shards.write(self._keys, self._embeddings)
        for group in self._finished:
            self.claims.release(self.claim_name(group))
        self._keys, self._embeddings, self._finished = [], [], []
        self._written_at = time.monotonic()

    def _part(self, values: NDArray[Any], group: int) -> NDArray[Any]:
        return values[group * _CLAIMED_PROMPTS : (group + 1) * _CLAIMED_PROMPTS]


def _read_width(text_encoder: Path) -> int:
    path = text_encoder / "config.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["d_model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} does not say how wide embeddings are.", why=str(error), fix="Download it again."
        ) from error


def _note(message: str) -> None:
    if read_ranks().is_first:
        say(message)
