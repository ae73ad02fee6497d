"""A frozen model in slices, one on each rank's device: its blocks are brought together ahead of their use and dropped again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wandistiller.distributed.sharding import Sharding
from wandistiller.errors import UsageError
from wandistiller.memory.placement import Footprint, Placed, Placement, Subject
from wandistiller.units import Bytes

_WHOLE_BLOCKS = 2


class AcrossRanks(Placement):
    """Not among the placements by name: it is for ranks that load, call and drop a model together, in the same order."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def predict(self, subject: Subject, device: torch.device) -> Footprint:
        """Return a rank's slice, two whole blocks (one computes, one arrives), and what is in no block."""
        blocks = [_num_bytes(block.parameters()) for block in subject.blocks]
        total, size = _num_bytes(subject.model.parameters()), self._mesh.size(-1)
        whole = sum(sorted(blocks)[-_WHOLE_BLOCKS:]) + total - sum(blocks)
        kept = -(-total // size) + _num_bytes(subject.model.buffers())
        return Footprint(devices={str(device): Bytes(kept + whole)})

    def attach(self, subject: Subject, device: torch.device) -> Placed:
        footprint = self.predict(subject, device)
        sharding = Sharding(subject.model, subject.blocks, self._mesh)
        if subject.read is not None:
            sharding.fill(subject.read, device)
        note = f"sharded takes {footprint.device} on {device}: one slice of {self._mesh.size(-1)}, and blocks as they compute"
        return Placed(footprint, _refuse, note)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _refuse() -> None:
    raise UsageError("Slices of a model are not put together again.", fix="Drop the model and load it anew.")
