"""Random weights for models that are only to be tried: no files, and no more time than a copy takes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Generator, Tensor, nn, randn

_POOL = 2**24
_SHARD_BYTES = 2 * 10**9


class RandomWeights:
    """Values for a model's tensors by name, all cut from one pool."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Remember the shapes of a model, which may be on the meta device; ``dtype`` is for all, if not its own."""
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._specs = {name: (tensor.shape, dtype or tensor.dtype) for name, tensor in tensors}
        values = randn(_POOL, generator=Generator().manual_seed(0)) * 0.02
        self._pools = {dtype: values.to(dtype) for dtype in {dtype for _, dtype in self._specs.values()}}

    def __call__(self, name: str) -> Tensor:
        shape, dtype = self._specs[name]
        count, pool = shape.numel(), self._pools[dtype]
        return (pool if count <= _POOL else pool.repeat(-(-count // _POOL)))[:count].view(shape).clone()

    def num_bytes(self, name: str) -> int:
        """Return how large a tensor is."""
        shape, dtype = self._specs[name]
        return shape.numel() * dtype.itemsize


def write_weights(weights: RandomWeights, names: Iterable[str], folder: Path) -> list[Path]:
    """Write tensors in their order as released models have them: in shards, one at a time in memory, with an index."""
    shards: list[list[str]] = [[]]
    used = 0
    for name in names:
        if used and used + weights.num_bytes(name) > _SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += weights.num_bytes(name)
    index: dict[str, str] = {}
    files = []
    for number, shard in enumerate(shards, 1):
        files.append(folder / f"diffusion_pytorch_model-{number:05}-of-{len(shards):05}.safetensors")
        save_file({name: weights(name) for name in shard}, files[-1])
        index |= dict.fromkeys(shard, files[-1].name)
    content = {"metadata": {}, "weight_map": index}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(content))
    return files
