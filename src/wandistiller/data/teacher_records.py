"""What a teacher said, on disk: noisy latents, their sigmas and its velocities, so that later epochs need no teacher.

A folder of shards, one for each batch that the teacher was asked, and ``records.json``, which says what they are of and, once
all are there, that they are complete. A shard's name says what was asked: one that is there is not made again, and more
questions only add shards. One that is missing or cut short is made again; records of something else are refused. Each record
has a checksum, which is looked at when the record is read: to look at all of them beforehand would take as long as an epoch.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wandistiller.data.buckets import AllOne, Bucket
from wandistiller.data.cached_samples import CachedSamples
from wandistiller.data.loader import sample_generator
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import CheckpointError, OutOfRoomError, UsageError
from wandistiller.files import complete_or_absent
from wandistiller.flow.path import data_from_velocity, interpolate
from wandistiller.models.weight_files import Planned, write_safetensors
from wandistiller.terminal import progress, say
from wandistiller.units import Bytes

_ABOUT = "records.json"
Way = Literal["shared", "in_step", "first"]
"""Who asks: ranks share the questions, or share them and ask at the same time, or the first rank asks all."""
_LITTLE_NOISE = 0.5
DTYPE = torch.float16
"""Noisy latents and velocities are a few units large, and 11 bits of them are more than the student gets right."""
_VALUES = ("noisy", "target", "sigma", "item", "draw", "is_empty")
_NUMBERS = ("item", "draw", "is_empty")
_CHECKSUM = "checksum"
_NUMBERS_BYTES = 29  # a record's sigma, item, draw, is_empty and checksum


@dataclass(frozen=True)
class Records:
    """One shard's worth: what the teacher was asked and what it said."""

    noisy: Tensor
    sigma: Tensor
    target: Tensor
    item: Tensor
    """Numbers of the captions."""
    draw: Tensor
    """Which noise of its item it was: the number of the draw."""
    is_empty: Tensor
    """Whether it was asked without the caption."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What the teacher is asked together: some items, with one or several draws of noise for each."""

    items: range
    draws: range
    origin: str
    """Fingerprint of the items: another one if any of them is something else."""
    num_records: int

    @property
    def file_name(self) -> str:
        asked = f"{self.items} {self.draws} {self.origin}"
        digest = hashlib.sha256(asked.encode()).hexdigest()[:16]
        return f"shard-{self.items.start:06d}-{self.draws.start:04d}-{digest}.safetensors"


@dataclass(frozen=True)
class RecordPlan:
    """What the records are of, and how many."""

    about: Mapping[str, Any]
    """What all of them depend on."""
    latent_shape: tuple[int, int, int, int]
    shards: Sequence[Shard]

    @property
    def name(self) -> str:
        """What to call a folder of such records: something else for each thing that they depend on."""
        return hashlib.sha256(json.dumps(dict(self.about), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def count(self) -> int:
        return sum(shard.num_records for shard in self.shards)

    def num_bytes(self, shards: Sequence[Shard] | None = None) -> Bytes:
        """Return what shards take on disk; None for all of them."""
        count = sum(shard.num_records for shard in (self.shards if shards is None else shards))
        return Bytes(count * (2 * DTYPE.itemsize * torch.Size(self.latent_shape).numel() + _NUMBERS_BYTES))


class TeacherRecords:
    """A folder of records, read by number."""

    def __init__(self, folder: Path, plan: RecordPlan) -> None:
        self.folder = folder
        self.plan = plan
        self._starts = list(itertools.accumulate((shard.num_records for shard in plan.shards), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def missing(self) -> list[Shard]:
        """Shards that are not there, or cannot be read."""
        return [shard for shard in self.plan.shards if not self._is_there(shard)]

    def check(self, missing: Sequence[Shard]) -> None:
        """Refuse a folder of other records, and a disk that is too small, before anything is computed."""
        found = self._read_about().get("about")
        if isinstance(found, dict):
            differing = differences(found, self.plan.about)
            if differing:
                raise UsageError(
                    f"{self.folder} holds what another teacher said, or to other questions.",
                    why=f"{differing}.",
                    fix="Remove the folder, or give another one.",
                )
        needed = self.plan.num_bytes(missing)
        place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = Bytes(shutil.disk_usage(place).free)
        if needed > free:
            raise OutOfRoomError(
                f"What the teacher says would take {needed} in {self.folder}, and the disk has {free} left.",
                fix="Make room, ask for fewer --num-prompts or --rollout-steps, or leave --cache-teacher away.",
            )

    @property
    def is_complete(self) -> bool:
        return self._is_marked and not self.missing

    def fill(self, ask: Callable[[Shard], Records], ranks: Ranks, way: Way = "shared") -> None:
        """Make the shards that are missing; ``ask`` gives what one of them holds."""
        missing = self.missing
        self.check(missing)
        if not missing and self._is_marked:
            return
        if ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_about(complete=False)
            count = sum(shard.num_records for shard in missing)
            say(f"{len(self)} answers of the teacher, {count} to ask for: {self.plan.num_bytes(missing)} in {self.folder}")
        ranks.wait()  # before the first one is made, so that all ranks miss the same
        turns = (ranks if way != "first" else Ranks()).turns(len(missing))
        mine = [(missing[place], counts) for place, counts in turns if counts or way == "in_step"]
        if way == "first" and not ranks.is_first:
            mine = []
        with progress("Asking the teacher", sum(shard.num_records for shard, _ in mine), "record") as advance:
            for shard, counts in mine:
                found = ask(shard)
                if counts:
                    self._write(shard, found)
                advance(shard.num_records)
        ranks.wait_long()
        _open.cache_clear()  # what was made again has the name of what was there
        if ranks.is_first:
            self._write_about(complete=True)
        ranks.wait()

    def remove_earlier(self, ranks: Ranks) -> None:
        """Remove the shards of earlier draws than these, once no rank reads them any more."""
        ranks.wait()
        _open.cache_clear()
        first = min(shard.draws.start for shard in self.plan.shards)
        for path in self.folder.glob("shard-*-*-*.safetensors") if ranks.is_first else ():
            if int(path.name.split("-")[2]) < first:
                path.unlink()

    def read(self, index: int) -> dict[str, Tensor]:
        """Return ``noisy``, ``sigma`` and ``target`` of one record in float32, its ``item``, ``draw`` and ``is_empty``.

        Raises ``CheckpointError`` where they are not what was written.
        """
        number = bisect.bisect_right(self._starts, index) - 1
        path, row = self._path(self.plan.shards[number]), index - self._starts[number]
        shard = _open(str(path))
        names = set(shard.keys())  # earlier versions wrote no checksum, and asked about captions alone
        found = {name: shard.get_slice(name)[row] for name in _VALUES if name in names}
        has_checksum = _CHECKSUM in names
        if has_checksum and int(shard.get_slice(_CHECKSUM)[row]) != _checksum(found.values()):
            raise CheckpointError(
                f"{path} is damaged.",
                why=f"its record {row} is not what was written.",
                fix="Remove this file and start again with --resume auto: what is missing is asked for again.",
            )
        found.setdefault("is_empty", torch.tensor(0, dtype=torch.uint8))
        return {name: value if name in _NUMBERS else value.float() for name, value in found.items()}

    def _path(self, shard: Shard) -> Path:
        return self.folder / shard.file_name

    def _is_there(self, shard: Shard) -> bool:
        """Look at the header, which says how long the file has to be."""
        try:
            with safe_open(str(self._path(shard)), framework="pt") as file:
                return bool(file.get_slice("noisy").get_shape()[0] == shard.num_records)
        except (OSError, SafetensorError):
            return False

    def _write(self, shard: Shard, records: Records) -> None:
        values = {
            "noisy": records.noisy.to("cpu", DTYPE),
            "target": records.target.to("cpu", DTYPE),
            "sigma": records.sigma.float().cpu(),
            "item": records.item.long().cpu(),
            "draw": records.draw.long().cpu(),
            "is_empty": records.is_empty.to("cpu", torch.uint8),
        }
        rows = zip(*(values[name] for name in _VALUES), strict=True)
        values[_CHECKSUM] = torch.tensor([_checksum(row) for row in rows], dtype=torch.int64)
        write_safetensors(self._path(shard), [_planned(name, each) for name, each in values.items()], {})

    def _read_about(self) -> dict[str, Any]:
        """Return what the folder says of itself; nothing where that cannot be read, as it is written again then."""
        try:
            found = json.loads((self.folder / _ABOUT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def _is_marked(self) -> bool:
        return self._read_about().get("complete") is True

    def _write_about(self, *, complete: bool) -> None:
        text = json.dumps({"about": dict(self.plan.about), "count": len(self), "complete": complete}, indent=1)
        with complete_or_absent(self.folder / _ABOUT) as partial:
            partial.write_text(text, encoding="utf-8")


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Say what differs, for a message; nothing if all is the same. ``found`` comes from a JSON file."""
    wanted = json.loads(json.dumps(dict(wanted)))
    differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    return "; ".join(f"{key} was {found.get(key)} and is {wanted.get(key)}" for key in differing[:3])


def _planned(name: str, tensor: Tensor) -> Planned:
    return Planned(name, tensor.dtype, tuple(tensor.shape), lambda: tensor.contiguous())


def _checksum(values: Iterable[Tensor]) -> int:
    """Return what tells a record apart from a damaged one."""
    found = 0
    for each in values:
        found = zlib.crc32(each.contiguous().reshape(-1).view(torch.uint8).numpy(), found)
    return found


@functools.lru_cache(maxsize=64)
def _open(path: str) -> Any:
    return safe_open(path, framework="pt")


class RecordSamples:
    """Records as training samples, each with the text of its caption."""

    def __init__(
        self,
        records: TeacherRecords,
        bucket: Bucket,
        texts: Callable[[int], Tensor],
        empty_text: Tensor,
        made_of: Callable[[int, int], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """``made_of`` gives the latents and the noise of an item's draw, where they are wanted too."""
        self.records = records
        self._texts = texts
        self._empty_text = empty_text
        self._made_of = made_of
        self.buckets: Sequence[Bucket] = AllOne(bucket, len(records))

    def __len__(self) -> int:
        return len(self.buckets)

    def name(self, index: int) -> str:
        """Return what a message calls a sample."""
        return f"record {index}"

    def some_data(self, count: int) -> Iterator[Tensor]:
        """Yield the data that the teacher points to from little noise, or the least there is, one sample at a time."""
        first = range(self.records.plan.shards[0].num_records)
        least = min(float(self.records.read(index)["sigma"]) for index in first)
        for index in range(len(self)):
            found = self.records.read(index)
            if found["sigma"] <= max(least, _LITTLE_NOISE):
                yield data_from_velocity(found["noisy"][None], found["target"][None], float(found["sigma"]))
                count -= 1
            if count == 0:
                return

    def read(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return a sample's tensors; nothing about it is random any more."""
        found = self.records.read(index)
        item, draw, is_empty = (int(found.pop(name)) for name in _NUMBERS)
        more = self._made_of(item, draw) if self._made_of is not None else {}
        return {**found, **more, "text": self._empty_text if is_empty else self._texts(item)}


def read_draw(samples: CachedSamples, item: int, draw: int, seed: int) -> dict[str, Tensor]:
    """Return a sample of a data set with the noise and the sigma of one of its draws."""
    return samples.read(item, sample_generator(seed, draw, item))


def record_draws(samples: CachedSamples, shard: Shard, seed: int, ask: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Records:
    """Draw noise and sigmas for samples of a data set, and keep what ``ask(noisy, sigma, text)`` says to each draw."""
    found = []
    for draw in shard.draws:
        drawn = [read_draw(samples, item, draw, seed) for item in shard.items]
        batch = {name: pad_sequence([each[name] for each in drawn], batch_first=True) for name in ("latents", "noise", "text")}
        sigma = torch.stack([each["sigma"] for each in drawn])
        noisy = interpolate(batch["latents"], batch["noise"], sigma)
        items = torch.tensor(shard.items)
        is_empty = torch.tensor([each["text"] is samples.empty_text for each in drawn])
        target = ask(noisy, sigma, batch["text"])
        found.append(Records(noisy, sigma, target, items, torch.full_like(items, draw), is_empty))
    return join_records(found)


def join_records(records: Sequence[Records]) -> Records:
    """Return all of them as one."""
    return Records(**{name: torch.cat([getattr(each, name) for each in records]) for name in _VALUES})
