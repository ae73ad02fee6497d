"""Batches on their way to the device: read ahead by workers, with the randomness that belongs to each sample.

Whatever is random about a sample (its noise, its sigma, whether its caption is dropped) is drawn from a generator that is
seeded by the run's seed, the epoch and the sample. It is the same on any number of ranks and after any resume.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from wandistiller.data.batches import MicroBatch, StepPlan
from wandistiller.errors import WanDistillerError

Sample = dict[str, Tensor]
_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent has died."""


class SampleReader(Protocol):
    """Where samples come from."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return what a message calls a sample."""
        ...

    def read(self, index: int, generator: torch.Generator) -> Sample:
        """Return a sample's tensors without a batch dimension; what is random comes from the generator."""
        ...


@dataclass
class Batch:
    """Samples stacked, and who they are."""

    tensors: dict[str, Tensor]
    names: tuple[str, ...]
    position: int
    epoch: int
    step: int = 0
    """Steps done before the one that this batch is part of; the loop says it."""

    @property
    def num_samples(self) -> int:
        return len(self.names)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device; the copy does not stop the host."""
        moved = {name: _moved(tensor, device) for name, tensor in self.tensors.items()}
        return Batch(moved, self.names, self.position, self.epoch)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    if device.type == "mps" and tensor.dtype == torch.float64:
        return tensor  # Apple's GPUs have none; what is so exact is drawn from, not computed with
    return tensor.to(device)


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return the generator of one sample in one epoch."""
    # A fixed mixing of the three numbers into 63 bits (splitmix64), so that neighbours have nothing in common.
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return torch.Generator().manual_seed((mixed ^ (mixed >> 31)) >> 1)


def read_batch(reader: SampleReader, planned: MicroBatch, seed: int) -> Batch:
    """Read and stack the samples of a micro-batch."""
    samples = [reader.read(index, sample_generator(seed, planned.epoch, index)) for index in planned.indices]
    tensors = {name: _stack([sample[name] for sample in samples]) for name in samples[0]}
    return Batch(tensors, tuple(reader.name(index) for index in planned.indices), planned.position, planned.epoch)


def _stack(tensors: list[Tensor]) -> Tensor:
    """Stack tensors; those that are shorter than others, as captions are, get zeros at their end."""
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(tensors)
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def load_steps(
    reader: SampleReader, steps: StepPlan, *, start: int, rank: int, seed: int, workers: int
) -> Generator[list[Batch]]:
    """Yield a rank's micro-batches step by step, endlessly, from a position on; read ahead by ``workers`` processes."""

    def planned() -> Iterator[MicroBatch]:
        position = start
        while True:
            yield from steps.mine(position, rank)
            position += steps.batches_per_step

    loader: DataLoader[Any] = DataLoader(
        _MicroBatches(reader, seed),
        batch_size=None,
        sampler=_Order(planned),
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        # Without one of its own it draws from the global random numbers, and a resumed run would see others.
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=_depend_on_parent,
    )
    ready: list[Batch] = []
    for batch in loader:
        if isinstance(batch, WanDistillerError):
            raise batch
        ready.append(batch)
        if len(ready) == steps.accumulation:
            yield ready
            ready = []


def _depend_on_parent(worker: int) -> None:
    """Let the process that is read for decide: what stops a job tells all processes, and a dead worker would end it unsaved.

    A worker ends with that process, though: it has its connections too, and ranks that wait for a dead one would not see them
    close before PyTorch's worker has noticed, after five seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _MicroBatches(Dataset[Any]):
    """A data set whose keys are planned micro-batches."""

    def __init__(self, reader: SampleReader, seed: int) -> None:
        self._reader = reader
        self._seed = seed

    def __getitem__(self, planned: Any) -> Batch | WanDistillerError:
        try:
            return read_batch(self._reader, planned, self._seed)
        except WanDistillerError as error:
            # Raised in a worker it would come out as the text of a traceback.
            return error


class _Order:
    """What ``DataLoader`` calls a sampler: the keys in their order."""

    def __init__(self, make: Callable[[], Iterator[MicroBatch]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._make()
