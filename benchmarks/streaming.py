"""Forward with the weights outside of the GPU: ours against the public ways, in one run.

python benchmarks/streaming.py --output benchmarks/results [--sizes wan2.2-5b wan2.1-14b] [--tiny]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from common import (
    DEVICE,
    Measurement,
    RandomWeights,
    empty_model,
    fill,
    host_to_device_bandwidth,
    inputs_for,
    measure,
    release,
    save,
)
from torch import nn

from wandistiller.memory.host import page_locked_bytes
from wandistiller.memory.streaming import stream_blocks

# Latents (frames, height, width) and batch; the first is the length that the model is made for.
SHAPES = {
    "wan2.2-5b": {"video, 27,280 tokens": (31, 44, 80, 1), "one image": (1, 44, 80, 1), "8 images": (1, 44, 80, 8)},
    "wan2.1-14b": {"video, 32,760 tokens": (21, 60, 104, 1), "one image": (1, 60, 104, 1), "8 images": (1, 60, 104, 8)},
    "wan2.1-1.3b": {"video, 32,760 tokens": (21, 60, 104, 1), "one image": (1, 60, 104, 1), "8 images": (1, 60, 104, 8)},
    "tiny": {"video, 48 tokens": (3, 8, 8, 1), "one image": (1, 8, 8, 1), "8 images": (1, 8, 8, 8)},
}
Ready = Callable[[str, RandomWeights], nn.Module]


def resident(size: str, weights: RandomWeights) -> nn.Module:
    return fill(empty_model(size), weights, DEVICE)


def compiled(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    return model


def ours(size: str, weights: RandomWeights, **options: object) -> nn.Module:
    model = empty_model(size).requires_grad_(False)
    model.stream = stream_blocks(model, list(model.blocks), DEVICE, read=weights, **options)
    return model


def block_by_block(size: str, weights: RandomWeights) -> nn.Module:
    """``.to()`` and ``.cpu()`` for each block, as the guides show."""
    model = fill(empty_model(size), weights, torch.device("cpu"))
    for name, child in model.named_children():
        if name != "blocks":
            child.to(DEVICE)
    model.scale_shift_table.data = model.scale_shift_table.data.to(DEVICE)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: module.to(DEVICE) and None)
        block.register_forward_hook(lambda module, args, out: module.cpu() and None)
    return model


def group_offload(kind: str, record: bool) -> Ready:
    def ready(size: str, weights: RandomWeights) -> nn.Module:
        from diffusers.hooks import apply_group_offloading

        model = fill(empty_model(size), weights, torch.device("cpu"))
        options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        apply_group_offloading(
            model,
            onload_device=DEVICE,
            offload_device=torch.device("cpu"),
            offload_type=kind,
            use_stream=DEVICE.type == "cuda",
            record_stream=record and DEVICE.type == "cuda",
            **options,
        )
        return model

    return ready


def accelerate_offload(size: str, weights: RandomWeights) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(fill(empty_model(size), weights, torch.device("cpu")), execution_device=DEVICE)


WAYS: dict[str, Ready] = {
    "resident": resident,
    "resident, compiled": lambda size, weights: compiled(resident(size, weights)),
    "wandistiller, 2 slots": ours,
    "wandistiller, 2 slots, compiled": lambda size, weights: compiled(ours(size, weights)),
    "wandistiller, 2 slots, process capped at 8 GiB": ours,
    "wandistiller, 2 slots, 8-bit": lambda size, weights: ours(size, weights, quantise=True),
    "diffusers group offload, block": group_offload("block_level", False),
    "diffusers group offload, block, record_stream": group_offload("block_level", True),
    "diffusers group offload, leaf, record_stream": group_offload("leaf_level", True),
    "accelerate cpu_offload": accelerate_offload,
    ".to() / .cpu() per block": block_by_block,
}
CAP_BYTES = 8 * 2**30 - 600 * 2**20
"""Of the 8 GiB, what the allocator may take: the CUDA context and the libraries' own memory count too."""
SLOW = ("accelerate cpu_offload", ".to() / .cpu() per block")


@contextmanager
def way(name: str, size: str, weights: RandomWeights) -> Iterator[nn.Module]:
    release()
    limit_memory(CAP_BYTES if "capped" in name else None)
    model = WAYS[name](size, weights)
    yield model
    if hasattr(model, "stream"):
        model.stream.store.flats.clear()
        model.stream.slots.clear()
    torch._dynamo.reset()
    limit_memory(None)


def limit_memory(num_bytes: int | None) -> None:
    """Let the allocator refuse more than this; None for all that the card has."""
    if DEVICE.type == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else num_bytes / total)


def measure_way(name: str, size: str, weights: RandomWeights, block_bytes: int) -> list[Measurement]:
    rows = []
    with way(name, size, weights) as model, torch.no_grad():
        note = f"page-locked/weights {page_locked_bytes() / block_bytes:.3f}" if hasattr(model, "stream") else ""
        if "8-bit" in name:
            store = model.stream.store
            note += f", 8-bit error {store.relative_error:.4f}, worst tensor {store.worst_error:.4f}"
        for shape, (frames, height, width, batch) in SHAPES[size].items():
            inputs = inputs_for(size, frames, height, width, batch)
            release()
            runs, warmup = (1, 0) if name in SLOW else (3, 2 if "compiled" in name or "wandistiller" in name else 1)
            run = functools.partial(model, *inputs)
            rows.append(measure(f"{size} {shape}", name, run, runs=runs, warmup=warmup, note=note))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--sizes", nargs="+", default=["wan2.2-5b", "wan2.1-14b"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    arguments = parser.parse_args()
    bandwidth = host_to_device_bandwidth()
    print(f"host to device, page-locked: {bandwidth / 1e9:.1f} GB/s")
    rows: list[Measurement] = []
    for size in arguments.sizes:
        weights = RandomWeights(empty_model(size))
        block_bytes = sum(p.nbytes for p in empty_model(size).blocks.parameters())
        for shape, (frames, height, width, batch) in SHAPES[size].items():
            print(f"{size} {shape}: {block_bytes / 1e9:.2f} GB of blocks over the bus take {block_bytes / bandwidth:.4f} s")
        for name in arguments.ways:
            rows += measure_way(name, size, weights, block_bytes)
            save("streaming", rows, arguments.output, host_to_device_gb_per_second=bandwidth / 1e9)


if __name__ == "__main__":
    main()
