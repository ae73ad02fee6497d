"""The peak of bytes held by live tensors, counted storage by storage: allocators' and kernels' own memory left out."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what is made inside of the ``with`` block."""

    latest: LiveBytes

    def __init__(self) -> None:
        super().__init__()
        LiveBytes.latest = self
        self.now = 0
        self.peak = 0
        self.num_made = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in before:
                self._track(leaf.untyped_storage())
        return out

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made out of sight, inside of a custom operator."""
        self._track(tensor.untyped_storage())

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.num_made += 1
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
