"""torchrun's environment: who this process is, and the few collectives that training needs beside DDP's own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Its functions take the world as it is when they are first seen as the value of a parameter. Seen later, when DDP asks for it,
# they would keep the group and its threads for good, and a thread that needs the interpreter while it ends aborts the process.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wandistiller.distributed.meeting import meet
from wandistiller.distributed.watch import Watch
from wandistiller.doing import noted
from wandistiller.errors import UsageError

_meshes: list[DeviceMesh] = []
_stores: list[dist.Store] = []
_POLL_SECONDS = 0.1
_NCCL_GRACE_SECONDS = 30.0
"""So much later NCCL aborts a process that waits: the watch has said why before."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    ranks_here: int = 1
    """On this machine."""

    def cards(self, count: int) -> range:
        """Return which of a machine's GPUs are this rank's: each has as many."""
        share = count // self.ranks_here
        return range(self.local_rank * share, (self.local_rank + 1) * share)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and talks."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on all of them."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        with noted("gathering what all ranks have", waits_for_ranks=True):
            dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """Return the first rank's value, on all of them; tensors in it have to be in host memory."""
        if self.world_size == 1:
            return value
        found = [value]
        with noted("waiting for what the first rank has", waits_for_ranks=True):
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def wait(self) -> None:
        """Return when every rank is here."""
        if self.world_size > 1:
            with noted("waiting for all ranks", waits_for_ranks=True):
                dist.barrier()

    def wait_long(self) -> None:
        """The same where some rank may take hours: not by a collective, which gives up after ``--rank-timeout``."""
        if self.world_size > 1:
            store = _stores[-1]
            with noted("waiting for what one rank does"):
                everybody = -(-store.add("waiting", 1) // self.world_size) * self.world_size
                while store.add("waiting", 0) < everybody:
                    time.sleep(_POLL_SECONDS)

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values, the same on all."""
        if self.world_size == 1:
            return value
        found = torch.tensor([value], device=_collective_device())
        with noted("comparing numbers of all ranks", waits_for_ranks=True):
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return int(found.item())

    def turns(self, count: int) -> list[tuple[int, bool]]:
        """Return this rank's share of ``count`` things by number, each with whether it counts.

        Every rank has the same number of turns, so that those who compute together keep step; a rank whose share is smaller
        does something again that does not count.
        """
        numbers = range(self.rank, -(-count // self.world_size) * self.world_size, self.world_size)
        return [(number if number < count else number % count, number < count) for number in numbers]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average a tensor over the ranks, in place."""
        if self.world_size > 1:
            with noted("averaging numbers of all ranks", waits_for_ranks=True):
                dist.all_reduce(values)
            values /= self.world_size
        return values


def read_ranks() -> Ranks:
    """Read who this process is; alone if torchrun did not start it."""

    def number(name: str, alone: str) -> int:
        return int(os.environ.get(name, alone))

    return Ranks(number("RANK", "0"), number("WORLD_SIZE", "1"), number("LOCAL_RANK", "0"), number("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def joined(device: torch.device, timeout_seconds: float = 1800.0, *, needs_group: bool = False) -> Iterator[Ranks]:
    """Join the job's ranks for as long as the block runs: NCCL between CUDA devices, else gloo.

    A collective may take ``timeout_seconds``; ranks that fall silent are given up before that (see ``watch``).
    ``needs_group`` makes a process group for one rank too, for what works on groups alone. Whatever refers to the group must
    be gone when the block ends, models that are spread over ranks too.
    """
    ranks = read_ranks()
    if ranks.world_size == 1 and not needs_group:
        yield ranks
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "mps":
        raise UsageError("Several ranks on Apple GPUs are not possible.", fix="Start without torchrun.")
    whole_store, _, _ = next(dist.rendezvous("env://", ranks.rank, ranks.world_size))
    store = meet(whole_store, ranks.rank, ranks.world_size, timeout_seconds)
    watch = Watch(store, ranks.rank, ranks.world_size, timeout_seconds, ends_waiting=device.type == "cuda")
    options = {"store": store, "rank": ranks.rank, "world_size": ranks.world_size}
    patience = timeout_seconds + (_NCCL_GRACE_SECONDS if device.type == "cuda" else 0.0)
    dist.init_process_group(backend, timeout=timedelta(seconds=patience), **options)
    watch.start()
    _stores.append(store)
    try:
        yield ranks
        # Only after success: a rank that failed must not wait for the others. Until all are here, this one is still alive.
        ranks.wait()
    except RuntimeError as error:
        if not any(sign in str(error).lower() for sign in ("timed out", "timeout")):
            raise
        raise watch.waited_in_vain(timeout_seconds) from error
    finally:
        _stores.pop()
        watch.stop()
    for mesh in _meshes:
        # Distributed tensors remember for good how an operation is done, and with it the mesh, and with it the group.
        getattr(mesh, "_pg_registry", {}).clear()
    _meshes.clear()
    gc.collect()  # what still refers to the group, as DDP does in a circle, would keep its threads
    dist.destroy_process_group()


def make_mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Arrange all ranks in a mesh that is given up when they part."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    _meshes.append(mesh)
    return mesh


def rank_device(name: str, ranks: Ranks) -> str:
    """Return the name of the device for a rank: each has CUDA devices of its own, and works on the first of them."""
    is_cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    if ranks.world_size == 1 or not is_cuda:
        return name
    cards = ranks.cards(torch.cuda.device_count())
    if not cards:
        raise UsageError(
            f"There are more ranks on this machine than its {torch.cuda.device_count()} GPUs.",
            fix="Start with --nproc-per-node of that number, or use --device cpu.",
        )
    return f"cuda:{cards[0]}"


def _collective_device() -> torch.device:
    is_nccl_only = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl_only else torch.device("cpu")
