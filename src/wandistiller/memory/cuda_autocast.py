"""Autocasting as a CUDA device does it, for computations on fake tensors of the CPU.

PyTorch has other lists of operators for the CPU, and what is cast decides what is kept for backward. The lists below are cut
down to what this PyTorch has registered for CUDA: they differ between versions. ``standing_in`` puts this in the place of
``torch.autocast``. Weights that were cast stay cast until the outermost context ends, as they do on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


def _registered(names: str) -> frozenset[str]:
    """Return those that are cast on a CUDA device."""

    def is_registered(name: str) -> bool:
        operator = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow"}.get(name, name)
        packet = getattr(torch.ops.aten, operator)
        kernels = [packet._qualified_op_name + ("" if each == "default" else f".{each}") for each in packet.overloads()]
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "AutocastCUDA") for kernel in kernels)

    return frozenset(name for name in names.split() if is_registered(name))


SHORT = _registered(
    """addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution einsum linalg_vecdot linear matmul mm mv prelu scaled_dot_product_attention
    __matmul__ __rmatmul__"""
)
"""Operators that compute in 16 bits."""
LONG = _registered(
    """acos asin binary_cross_entropy_with_logits cdist cosh cosine_similarity cross cumprod cumsum dist dot erfinv exp expm1
    grid_sampler group_norm huber_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp mse_loss norm
    pow __pow__ prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss softmax softplus sum tan vdot"""
)
"""Operators that compute in float32."""


class CudaAutocast(TorchFunctionMode):
    """``torch.autocast`` for the lists of a CUDA device; the innermost one counts."""

    _active: ClassVar[list[CudaAutocast]] = []
    _cast: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}
    _may_cache = True

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        super().__init__()
        self.dtype = dtype or torch.bfloat16
        self.is_enabled = enabled
        self._caches = cache_enabled is None or cache_enabled

    def __enter__(self) -> CudaAutocast:
        self._active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._active.pop()
        if not self._active:
            self._cast.clear()

    @classmethod
    @contextmanager
    def not_caching(cls) -> Iterator[None]:
        """Cast weights anew in every use, as compiled code does."""
        before, cls._may_cache = cls._may_cache, False
        try:
            yield
        finally:
            cls._may_cache = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._active[-1] is not self or not self.is_enabled:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in SHORT:
            args, kwargs = tree_map(self._shorten, (args, kwargs))
        elif name in LONG:
            args, kwargs = tree_map(_lengthen, (args, kwargs))
        return func(*args, **kwargs)

    def _shorten(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return value
        if value.dtype == self.dtype:
            return value
        if not (self._caches and self._may_cache and value.requires_grad and value.is_leaf and value.dtype == torch.float32):
            return value.to(self.dtype)
        if id(value) not in self._cast:
            self._cast[id(value)] = (value, value.to(self.dtype))
        return self._cast[id(value)][1]


def _lengthen(value: Any) -> Any:
    is_short = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_short else value


@contextmanager
def standing_in() -> Iterator[None]:
    """Let ``torch.autocast`` be this one, and let it be asked for as the CPU's and as the card's, which both are here."""

    def is_enabled(kind: str | None = None) -> bool:
        return kind in (None, "cpu", "cuda") and bool(CudaAutocast._active) and CudaAutocast._active[-1].is_enabled

    def dtype_of(kind: str) -> torch.dtype:
        return CudaAutocast._active[-1].dtype if CudaAutocast._active else torch.bfloat16

    with (
        mock.patch.object(torch, "autocast", CudaAutocast),
        mock.patch.object(torch, "is_autocast_enabled", is_enabled),
        mock.patch.object(torch, "get_autocast_dtype", dtype_of),
    ):
        yield
