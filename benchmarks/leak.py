"""Memory over 10,000 training steps on buckets of different shapes, ours and the plain way beside each other.

python benchmarks/leak.py --output benchmarks/results [--steps 10000]

A small Wan is trained with every part of the engine that holds memory between steps: more blocks than slots streamed from host
memory, gradients handed to the host, inputs and attention of all blocks sent to host memory, AdamW on the host. The plain way
is the same model on the card with diffusers' own checkpointing. Each has a process of its own, at the same time: what counts is
memory, not seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import psutil
import torch
from common import DEVICE, Measurement, RandomWeights, empty_model, fill, release, save
from torch import Tensor, nn

from wandistiller.memory import attention
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.host import page_locked_bytes
from wandistiller.memory.kept import HostKeeper, Kept
from wandistiller.memory.leak_watch import LeakWatch
from wandistiller.memory.streaming import stream_blocks

CONFIG = {"num_attention_heads": 2, "attention_head_dim": 64, "ffn_dim": 512, "num_layers": 3, "text_dim": 64, "freq_dim": 64}
BUCKETS = [(batch, frames, height, width) for batch in (1, 2) for frames in (1, 3) for height, width in ((16, 16), (12, 20))]


class CountingKeeper(HostKeeper):
    """Sends also what is small, as all of a small model is, and counts it."""

    num_sent = 0

    def put(self, tensor: Tensor) -> Kept:
        kept = super().put(tensor)
        CountingKeeper.num_sent += kept.is_away
        return kept


def ours() -> nn.Module:
    model = empty_model("wan2.1-1.3b", **CONFIG)
    weights = RandomWeights(model)
    apply_policy(list(model.blocks), "selective", DEVICE, keeper=CountingKeeper(DEVICE, min_bytes=1024))
    stream_blocks(model, list(model.blocks), DEVICE, read=weights, train=True)
    return model


def plain() -> nn.Module:
    model = empty_model("wan2.1-1.3b", **CONFIG)
    model = fill(model, RandomWeights(model), DEVICE).requires_grad_(True)
    model.enable_gradient_checkpointing()
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {
    "wandistiller, streamed, kept on the host": ours,
    "diffusers checkpointing": plain,
}


def observe() -> dict[str, int]:
    seen = {"host": psutil.Process().memory_info().rss, "page-locked": page_locked_bytes()}
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        seen |= {"device allocated": torch.cuda.memory_allocated(), "device reserved": torch.cuda.memory_reserved()}
    return seen


def train(way: str, steps: int, since: int) -> Measurement:
    """Train and return how much each kind of memory grew from step ``since`` to the last."""
    attention.MIN_KEYS = 64  # a small model's sequences are short
    release()
    torch.manual_seed(0)
    random.seed(0)
    model, watch = WAYS[way](), LeakWatch(warmup_steps=since)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    levels: dict[tuple[int, ...], dict[str, int]] = {}
    last: dict[tuple[int, ...], dict[str, int]] = {}
    start = time.perf_counter()
    for step in range(steps):
        batch, frames, height, width = bucket = random.choice(BUCKETS)
        options = {"device": DEVICE, "dtype": torch.bfloat16}
        noisy = torch.randn(batch, 16, frames, height, width, **options)
        text = torch.randn(batch, 32, CONFIG["text_dim"], **options)
        out = model(noisy, torch.full((batch,), 500.0, device=DEVICE), text, return_dict=False)[0]
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del out, noisy, text
        if step % 1000 == 0:
            print(way, "step", step, f"{time.perf_counter() - start:.0f} s", observe(), flush=True)
        if step >= since - len(BUCKETS) * 20 and (step % 10 == 0 or step >= steps - len(BUCKETS) * 20 or step < since):
            seen = observe()
            for kind, value in seen.items():
                watch.observe(step, kind, value, bucket)
            if step < since:
                levels[bucket] = seen
            last[bucket] = seen
    seconds = time.perf_counter() - start
    growth = {kind: max(last[bucket][kind] - levels[bucket][kind] for bucket in levels) for kind in next(iter(levels.values()))}
    leaks = "; ".join(map(str, watch.leaks())) or "none"
    note = f"growth from step {since} to {steps} in bytes: {growth}; leaks found: {leaks}"
    note += f"; {CountingKeeper.num_sent / steps:.1f} tensors a step were sent to host memory" if WAYS[way] is ours else ""
    row = Measurement(f"{steps} steps, {len(BUCKETS)} buckets", way, seconds / steps, note=note)
    if DEVICE.type == "cuda":
        row.peak_gib, row.reserved_gib = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    print(way, f"{seconds / steps * 1e3:.2f} ms a step", note, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--since", type=int, default=500)
    arguments = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(len(WAYS), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(train, way, arguments.steps, arguments.since) for way in WAYS]):
            rows.append(done.result())
            save("leak", rows, arguments.output)


if __name__ == "__main__":
    main()
