"""Forward with the weights on disk, against reading the same files with nothing else to do, in one run.

python benchmarks/disk.py --output benchmarks/results --folder /a/disk/with/room [--size wan2.2-5b]

Writes the model in bfloat16 as sharded safetensors, in the order of the layers and as released models have it, and drops the
files from the page cache before every run. The public way is accelerate's ``disk_offload``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from common import DEVICE, Measurement, RandomWeights, empty_model, fill, inputs_for, measure, release, save
from streaming import SHAPES
from torch import nn

from wandistiller.memory.placement import Placed, Subject
from wandistiller.memory.placements import find_placement
from wandistiller.memory.raw_reads import forget_files, read_files
from wandistiller.models.random_weights import write_weights
from wandistiller.models.stored import TRANSFORMER, StoredModel, build_empty, inspect_checkpoint


def write_model(size: str, weights: RandomWeights, folder: Path) -> list[Path]:
    """Write a model's weights in shards, with the configuration beside them."""
    model = empty_model(size)
    files = write_weights(weights, model.state_dict(), folder)
    (folder / "config.json").write_text(json.dumps({**model.config, "_class_name": "WanTransformer3DModel"}))
    os.sync()
    return files


def ours(stored: StoredModel) -> tuple[nn.Module, Placed]:
    model = build_empty(TRANSFORMER, stored.config, dtype=torch.bfloat16).requires_grad_(False)
    subject = Subject(
        model=model,
        blocks=list(model.blocks),
        read=lambda name: stored.read_for(name, torch.bfloat16),
        locate=lambda name: stored.locate(name, torch.bfloat16),
    )
    placed = find_placement("disk").attach(subject, DEVICE)
    model.stream = placed.stream
    return model, placed


def drained(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Run a pass and wait for what is read ahead for the next one, so that every run reads every byte once."""
    model(*inputs)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    store = model.stream.store
    for buffer in store._buffers:
        for piece in buffer.pieces:
            piece.result()


def public(size: str, weights: RandomWeights, folder: Path) -> nn.Module:
    from accelerate import disk_offload

    model = fill(empty_model(size), weights, torch.device("cpu"))
    return disk_offload(model, offload_dir=str(folder / "accelerate"), execution_device=DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--folder", type=Path, default=None, help="where to write the weights for as long as this runs")
    parser.add_argument("--size", default="wan2.2-5b")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--skip-public", action="store_true")
    arguments = parser.parse_args()
    size, rows = arguments.size, list[Measurement]()
    shape = SHAPES[size]["one image"]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        weights = RandomWeights(empty_model(size))
        files = write_model(size, weights, folder)
        total = sum(file.stat().st_size for file in files)

        def cold(run: Callable[[], object], what: list[Path] = files) -> Callable[[], object]:
            def once() -> object:
                forget_files(what)
                return run()

            return once

        def row(way: str, run: Callable[[], object], num_bytes: int, *, warmup: int = 0) -> float:
            found = measure(f"{size} one image, {num_bytes / 1e9:.2f} GB on disk", way, run, warmup=warmup, runs=1)
            assert found.seconds is not None
            rate = num_bytes / found.seconds / 1e9
            found.note = f"{rate:.3f} GB/s"
            print(found.note)
            rows.append(found)
            save("disk", rows, arguments.output)
            return rate

        row("raw sequential read, 1 threads", cold(lambda: read_files(files, num_threads=1)), total, warmup=1)
        inputs = inputs_for(size, *shape)
        with torch.no_grad():
            model, placed = ours(inspect_checkpoint(folder, TRANSFORMER))
            release()
            # In turn, as a disk that others use too is now faster, now slower.
            raw, own = list[float](), list[float]()
            for turn in range(1, arguments.turns + 1):
                raw.append(row(f"raw sequential read, 8 threads, turn {turn}", cold(lambda: read_files(files)), total))
                ours_cold = cold(lambda: drained(model, inputs))
                own.append(row(f"wandistiller, disk, turn {turn}", ours_cold, placed.footprint.disk, warmup=int(turn == 1)))
            ratio = statistics.median(own) / statistics.median(raw)
            print(f"wandistiller / raw, medians of {arguments.turns}: {ratio:.3f} (at least 0.9 is wanted)")
            placed.detach()
            del model, placed
            if not arguments.skip_public:
                release()
                model = public(size, weights, folder)
                theirs = sorted((folder / "accelerate").glob("*.dat"))
                row("accelerate disk_offload", cold(lambda: model(*inputs), theirs), total, warmup=1)


if __name__ == "__main__":
    main()
