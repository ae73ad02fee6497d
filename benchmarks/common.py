"""What the benchmarks share: models with random weights, timing, memory, results with the GPU's name."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from wandistiller.memory.allocator_model import expandable_segments
from wandistiller.memory.host import page_locked_bytes
from wandistiller.models.random_weights import RandomWeights
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Measurement:
    """One row of a result: seconds are the median of the runs after warm-up."""

    what: str
    way: str
    seconds: float | None
    peak_gib: float = 0.0
    reserved_gib: float = 0.0
    page_locked_gib: float = 0.0
    note: str = ""


def empty_model(size: str, **changes: object) -> nn.Module:
    """Return a named size on the meta device, in bfloat16 as Wan keeps it."""
    return build_empty(TRANSFORMER, {**SIZES[size].transformer, **changes}, dtype=torch.bfloat16)


def fill(model: nn.Module, weights: RandomWeights, device: torch.device) -> nn.Module:
    """Give a meta model its weights on a device, one tensor at a time."""
    from wandistiller.models.load import set_tensor

    for name in list(model.state_dict()):
        set_tensor(model, name, weights(name).to(device, copy=True))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)
    return model.requires_grad_(False)


def inputs_for(size: str, frames: int, height: int, width: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents, timesteps and text of a shape given in latents."""
    config = SIZES[size].transformer
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    latents = torch.randn(batch, config["in_channels"], frames, height, width, **options)
    return latents, torch.full((batch,), 500.0, device=DEVICE), torch.randn(batch, 512, config["text_dim"], **options)


def release() -> None:
    """Give back all memory that nothing refers to."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(what: str, way: str, run: Callable[[], object], *, warmup: int = 1, runs: int = 3, note: str = "") -> Measurement:
    """Time a call and read the peak of memory over it."""
    try:
        for _ in range(warmup):
            run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            run()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        row = Measurement(what, way, statistics.median(times), note=note)
    except torch.OutOfMemoryError:
        row = Measurement(what, way, None, note="out of memory")
    return with_memory(row)


def with_memory(row: Measurement) -> Measurement:
    """Add the peaks of memory since the last ``release`` to a row, and print it."""
    if DEVICE.type == "cuda":
        row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        row.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
    # Ours is locked without PyTorch's allocator, which the public ways use.
    theirs = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if DEVICE.type == "cuda" else 0
    row.page_locked_gib = (page_locked_bytes() + theirs) / 2**30
    seconds = "out of memory" if row.seconds is None else f"{row.seconds:8.4f} s"
    print(
        f"{row.what:32} {row.way:44} {seconds:14} peak {row.peak_gib:7.2f} reserved {row.reserved_gib:7.2f} GiB "
        f"page-locked {row.page_locked_gib:6.2f} GiB {row.note}",
        flush=True,
    )
    return row


def save(name: str, rows: list[Measurement], folder: Path, **facts: object) -> None:
    """Write rows as JSON with what they were measured on."""
    content = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "expandable_segments": expandable_segments(),
        **facts,
        "rows": [asdict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def host_to_device_bandwidth(num_bytes: int = 2**30) -> float:
    """Return page-locked host to device bandwidth in bytes a second."""
    if DEVICE.type != "cuda":
        return 10e9
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return num_bytes / statistics.median(times[1:])
