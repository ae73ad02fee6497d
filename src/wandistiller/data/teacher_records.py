"""What a teacher said, on disk: noisy latents, their sigmas and its velocities, so that later epochs need no teacher.

A folder of shards, one for each batch that the teacher was asked, and ``records.json``, which says what they are of and, once
all are there, that they are complete. A shard that is there is not made again; records of something else are refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wandistiller.data.buckets import Bucket
from wandistiller.data.cached_samples import CachedSamples
from wandistiller.data.loader import sample_generator
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import OutOfRoomError, UsageError
from wandistiller.files import complete_or_absent
from wandistiller.flow.path import data_from_velocity, interpolate
from wandistiller.models.weight_files import Planned, write_safetensors
from wandistiller.terminal import progress
from wandistiller.units import Bytes

_ABOUT = "records.json"
Way = Literal["shared", "in_step", "first"]
"""Who asks: ranks share the questions, or share them and ask at the same time, or the first rank asks all."""
_LITTLE_NOISE = 0.5
DTYPE = torch.float16
"""Noisy latents and velocities are a few units large, and 11 bits of them are more than the student gets right."""


@dataclass(frozen=True)
class Records:
    """One shard's worth: what the teacher was asked and what it said."""

    noisy: Tensor
    sigma: Tensor
    target: Tensor
    item: Tensor
    """Numbers of the captions."""


@dataclass(frozen=True)
class RecordPlan:
    """What the records are of, and how many."""

    about: Mapping[str, Any]
    """All that they depend on."""
    latent_shape: tuple[int, int, int, int]
    num_shards: int
    records_per_shard: int

    @property
    def name(self) -> str:
        """What to call a folder of such records: something else for each thing that they depend on."""
        return hashlib.sha256(json.dumps(dict(self.about), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def count(self) -> int:
        return self.num_shards * self.records_per_shard

    @property
    def num_bytes(self) -> Bytes:
        return Bytes(self.count * (2 * DTYPE.itemsize * torch.Size(self.latent_shape).numel() + 12))


class TeacherRecords:
    """A folder of records, read by number."""

    def __init__(self, folder: Path, plan: RecordPlan) -> None:
        self.folder = folder
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.count

    def check(self) -> None:
        """Refuse a folder of other records, and a disk that is too small, before anything is computed."""
        if (self.folder / _ABOUT).is_file():
            found = json.loads((self.folder / _ABOUT).read_text(encoding="utf-8"))["about"]
            wanted = json.loads(json.dumps(dict(self.plan.about)))
            differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
            if differing:
                raise UsageError(
                    f"{self.folder} holds what another teacher said, or to other questions.",
                    why="; ".join(f"{key} was {found.get(key)} and is {wanted.get(key)}" for key in differing[:3]) + ".",
                    fix="Remove the folder, or give another one.",
                )
        missing = sum(not self._shard(number).is_file() for number in range(self.plan.num_shards))
        needed = Bytes(int(self.plan.num_bytes) * missing // max(self.plan.num_shards, 1))
        place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = Bytes(shutil.disk_usage(place).free)
        if needed > free:
            raise OutOfRoomError(
                f"What the teacher says would take {needed} in {self.folder}, and the disk has {free} left.",
                fix="Make room, ask for fewer --num-prompts or --rollout-steps, or leave --cache-teacher away.",
            )

    @property
    def is_complete(self) -> bool:
        path = self.folder / _ABOUT
        return path.is_file() and bool(json.loads(path.read_text(encoding="utf-8"))["complete"])

    def fill(self, ask: Callable[[int], Records], ranks: Ranks, way: Way = "shared") -> None:
        """Make the shards that are missing; ``ask`` gives one by its number."""
        self.check()
        if self.is_complete:
            return
        if ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_about(complete=False)
        missing = [number for number in range(self.plan.num_shards) if not self._shard(number).is_file()]
        ranks.wait()  # before the first one is made, so that all ranks miss the same
        turns = (ranks if way != "first" else Ranks()).turns(len(missing))
        mine = [(missing[place], counts) for place, counts in turns if counts or way == "in_step"]
        if way == "first" and not ranks.is_first:
            mine = []
        with progress("Asking the teacher", len(mine) * self.plan.records_per_shard, "record") as advance:
            for number, counts in mine:
                found = ask(number)
                if counts:
                    self._write(number, found)
                advance(self.plan.records_per_shard)
        ranks.wait()
        if ranks.is_first:
            self._write_about(complete=True)
        ranks.wait()

    def read(self, index: int) -> dict[str, Tensor]:
        """Return ``noisy``, ``sigma``, ``target`` and ``item`` of one record, in float32."""
        number, row = divmod(index, self.plan.records_per_shard)
        shard = _open(str(self._shard(number)))
        found = {name: shard.get_slice(name)[row] for name in ("noisy", "target", "sigma", "item")}
        return {name: value if name == "item" else value.float() for name, value in found.items()}

    def _shard(self, number: int) -> Path:
        return self.folder / f"shard-{number:06d}.safetensors"

    def _write(self, number: int, records: Records) -> None:
        values = {
            "noisy": records.noisy.to("cpu", DTYPE),
            "target": records.target.to("cpu", DTYPE),
            "sigma": records.sigma.float().cpu(),
            "item": records.item.long().cpu(),
        }
        write_safetensors(self._shard(number), [_planned(name, each) for name, each in values.items()], {})

    def _write_about(self, *, complete: bool) -> None:
        text = json.dumps({"about": dict(self.plan.about), "count": len(self), "complete": complete}, indent=1)
        with complete_or_absent(self.folder / _ABOUT) as partial:
            partial.write_text(text, encoding="utf-8")


def _planned(name: str, tensor: Tensor) -> Planned:
    return Planned(name, tensor.dtype, tuple(tensor.shape), lambda: tensor.contiguous())


@functools.lru_cache(maxsize=64)
def _open(path: str) -> Any:
    return safe_open(path, framework="pt")


class RecordSamples:
    """Records as training samples, each with the text of its caption."""

    def __init__(self, records: TeacherRecords, bucket: Bucket, texts: Callable[[int], Tensor]) -> None:
        self._records = records
        self._texts = texts
        self.buckets: Sequence[Bucket] = [bucket] * len(records)

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        """Return what a message calls a sample."""
        return f"record {index}"

    def some_data(self, count: int) -> Iterator[Tensor]:
        """Yield the data that the teacher points to from little noise, one sample at a time."""
        for index in range(len(self)):
            found = self._records.read(index)
            if found["sigma"] < _LITTLE_NOISE:
                yield data_from_velocity(found["noisy"][None], found["target"][None], float(found["sigma"]))
                count -= 1
            if count == 0:
                return

    def read(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return a sample's tensors; nothing about it is random any more."""
        found = self._records.read(index)
        item = int(found.pop("item"))
        return {**found, "text": self._texts(item)}


def record_draws(
    samples: CachedSamples,
    items: Sequence[int],
    num_draws: int,
    seed: int,
    ask: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Records:
    """Draw noise and sigmas for samples of a data set, and keep what ``ask(noisy, sigma, text)`` says to each draw."""
    found = []
    for draw in range(num_draws):
        drawn = [samples.read(item, sample_generator(seed, draw, item)) for item in items]
        batch = {name: pad_sequence([each[name] for each in drawn], batch_first=True) for name in ("latents", "noise", "text")}
        sigma = torch.stack([each["sigma"] for each in drawn])
        noisy = interpolate(batch["latents"], batch["noise"], sigma)
        found.append(Records(noisy, sigma, ask(noisy, sigma, batch["text"]), torch.tensor(items)))
    return join_records(found)


def join_records(records: Sequence[Records]) -> Records:
    """Return all of them as one."""
    names = ("noisy", "sigma", "target", "item")
    return Records(*(torch.cat([getattr(each, name) for each in records]) for name in names))
