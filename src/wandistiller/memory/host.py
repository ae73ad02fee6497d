"""Host memory that a device can copy from at full speed, without a byte of rounding.

PyTorch's page-locked allocator rounds up to powers of two, which costs half as much again for blocks of a typical Wan. Here
memory is mapped page by page and registered with the driver as it is. Where that fails or a cap is reached the memory stays
pageable, which is several times slower to copy from, and a warning says so.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from wandistiller.units import Bytes

logger = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_page_locked = 0


def page_locked_bytes() -> Bytes:
    """Return how much memory this process has page-locked here, for monitors."""
    return Bytes(_page_locked)


def whole_pages(num_bytes: int) -> int:
    """Return what memory of this many bytes takes, which is page by page."""
    return -(-num_bytes // _PAGE) * _PAGE


@dataclass
class HostBudget:
    """How much may be page-locked; counts down as memory is taken."""

    remaining: int | None = None
    """None for no cap."""
    has_warned: bool = False

    def take(self, num_bytes: int) -> bool:
        """Say whether this many bytes may still be page-locked, and count them."""
        if self.remaining is None:
            return True
        if num_bytes > self.remaining:
            self.warn("the cap on page-locked memory is reached")
            return False
        self.remaining -= num_bytes
        return True

    def warn(self, why: str) -> None:
        """Say once that some memory is pageable."""
        if not self.has_warned:
            self.has_warned = True
            logger.warning("Some weights are in pageable host memory and copy several times slower: %s.", why)


def allocate_host(num_bytes: int, device: torch.device, budget: HostBudget | None = None) -> Tensor:
    """Return host memory as bytes, page-locked if ``device`` is a CUDA device and the budget allows it."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    budget = budget or HostBudget()
    size = max(whole_pages(num_bytes), _PAGE)
    pages = mmap.mmap(-1, size)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if budget.take(size):
        # The driver locks page by page as the memory is touched by one thread; touched in parallel first, that is quicker.
        _register(tensor.zero_(), budget, pages)
    return tensor[:num_bytes]


def large_pages(count: int) -> Tensor:
    """Return this many float32 zeros in large pages, where the system has them: quicker to go through from end to end."""
    if not (count and hasattr(mmap, "MADV_HUGEPAGE")):
        return torch.zeros(count)
    # Private, as large pages are for no other kind; never registered with the driver, which shared memory is better for.
    pages = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32).zero_()


def lock_pages(tensor: Tensor, device: torch.device, budget: HostBudget | None = None) -> None:
    """Page-lock memory that is there already, all that a tensor's storage has, under the same conditions."""
    budget = budget or HostBudget()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if device.type == "cuda" and budget.take(whole.numel()):
        _register(whole, budget)


def _register(tensor: Tensor, budget: HostBudget, pages: mmap.mmap | None = None) -> None:
    global _page_locked
    runtime = torch.cuda.cudart()
    address, size = tensor.data_ptr(), tensor.numel()
    status = int(runtime.cudaHostRegister(address, size, 0))
    if status != 0:
        budget.warn(f"the driver refused to lock {Bytes(size)} (error {status}); see ulimit -l")
        return
    _page_locked += size
    # Tied to the storage, which every view of the memory keeps alive.
    weakref.finalize(tensor.untyped_storage(), _unregister, address, size, pages)


def _unregister(address: int, size: int, pages: mmap.mmap | None) -> None:
    global _page_locked
    _page_locked -= size
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a copy from here may still be under way
        torch.cuda.cudart().cudaHostUnregister(address)
