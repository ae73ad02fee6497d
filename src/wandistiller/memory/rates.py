"""How fast this machine copies and multiplies, measured in moments."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from wandistiller.memory.host import large_pages
from wandistiller.memory.host_adamw import UPDATE_TRAFFIC, AdamW
from wandistiller.memory.host_threads import PIECE, HostThreads

COPY_BYTES = 64 * 2**20
_LONG_PRODUCT = 5e-3
"""Seconds from which a product is long enough to time."""


def copy_rate(device: torch.device, *, page_locked: bool = True, num_bytes: int = COPY_BYTES) -> float:
    """Return host to device bandwidth in bytes a second."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=page_locked and device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / _seconds(lambda: target.copy_(source, non_blocking=page_locked), device)


@functools.cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return floating-point operations a second in the products that a transformer is made of.

    Of large ones: many cores together reach their speed only in a product that takes a while.
    """
    size, seconds = 512, 0.0
    while seconds < _LONG_PRODUCT and size < 4096:
        size *= 2
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = _seconds(functools.partial(torch.matmul, left, right), device)
    return 2 * size**3 / seconds


@functools.cache
def elementwise_rate(dtype: torch.dtype) -> float:
    """Return the bytes a second that the CPU reads and writes where it computes value by value, into new memory each time."""
    left, right = (torch.ones(2**24, dtype=dtype) for _ in range(2))
    return 3 * left.nbytes / _seconds(lambda: left * right, torch.device("cpu"))


class Launches:
    """A pass of a tiny Wan, whose kernels a card does as fast as the host asks for them."""

    def __init__(self, device: torch.device) -> None:
        from wandistiller.memory.placement import Subject, find_placement
        from wandistiller.memory.uses import Use
        from wandistiller.models.random_weights import RandomWeights
        from wandistiller.models.sizes import SIZES

        config = {**SIZES["tiny"].transformer, "num_layers": 12}  # blocks, rather than what is there once
        use = Use(name="tiny", config=config, latent_shape=(8, 1, 8, 8), text_tokens=8)
        self._device = device
        self._model = use.build(use.num_blocks)
        find_placement("gpu").attach(Subject(model=self._model, blocks=[], read=RandomWeights(self._model)), device)
        options = {"device": device, "dtype": use.dtype}
        self._inputs = (
            torch.randn(1, *use.latent_shape, **options),
            torch.full((1,), 500.0, device=device),
            torch.randn(1, use.text_tokens, use.config["text_dim"], **options),
        )
        self.count = sum(use.tape.work(use.repeats).values())
        """Kernels in a pass."""

    @torch.no_grad()
    def __call__(self) -> int:
        """Ask for all of them; return how many they are."""
        self._model(*self._inputs)
        return self.count

    def seconds(self, *, least: float = 0.5) -> float:
        """Return the host's time for each: the usual one, also where others use the host, as steps will have it."""
        return _seconds(self, self._device, least=least) / self.count


@functools.cache
def launch_seconds(device: torch.device) -> float:
    """Return the host's time for a kernel that a Wan asks for."""
    return Launches(device).seconds()


@functools.cache
def update_rate() -> float:
    """Return the bytes a second that AdamW goes through in host memory, its threads together.

    Of several pieces a thread where that is less than a gigabyte: the caches of a large processor hold one for each.
    """
    threads = HostThreads()
    num_pieces = max(threads.count, min(4 * threads.count, 32))
    tensors = [large_pages(PIECE * num_pieces) for _ in range(3)]
    short = torch.zeros(PIECE * num_pieces, dtype=torch.bfloat16)
    adamw = AdamW(1e-5, (0.9, 0.999), 0.01, torch.tensor(1.0))

    def update(index: int, room: torch.Tensor) -> None:
        master, first, second, weights = (each[index * PIECE : (index + 1) * PIECE] for each in (*tensors, short))
        adamw.step([master], [room.copy_(weights)], [first], [second])
        weights.copy_(master)

    try:
        seconds = _seconds(lambda: threads.begin(update, num_pieces).wait(), torch.device("cpu"))
    finally:
        threads.close()
    return UPDATE_TRAFFIC * short.numel() / seconds


def fastest_cpu_dtype() -> torch.dtype:
    """Return the dtype that this CPU multiplies fastest: bfloat16 where it has instructions for that, else float32."""
    cpu = torch.device("cpu")
    return max((torch.float32, torch.bfloat16), key=lambda dtype: matmul_rate(cpu, dtype))


def _seconds(work: Callable[[], object], device: torch.device, *, least: float = 0.0) -> float:
    """Return the median time of five runs after one to warm up, and of more until these have taken ``least`` seconds."""
    times: list[float] = []
    work()
    while len(times) < 5 or sum(times) < least:
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def synchronise(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
