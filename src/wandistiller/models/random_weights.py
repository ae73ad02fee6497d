"""Random weights for models that are only to be tried: no files, and no more time than a copy takes."""

from __future__ import annotations

from torch import Generator, Tensor, nn, randn

_POOL = 2**24


class RandomWeights:
    """Values for a model's tensors by name, all cut from one pool."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the shapes of a model, which may be on the meta device."""
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}
        values = randn(_POOL, generator=Generator().manual_seed(0)) * 0.02
        self._pools = {dtype: values.to(dtype) for dtype in {dtype for _, dtype in self._specs.values()}}

    def __call__(self, name: str) -> Tensor:
        shape, dtype = self._specs[name]
        count, pool = shape.numel(), self._pools[dtype]
        return (pool if count <= _POOL else pool.repeat(-(-count // _POOL)))[:count].view(shape).clone()
