"""Host memory of four ranks with one teacher: how much more a large teacher takes in all than a tiny one, on one machine.

python benchmarks/shared_teacher.py --output benchmarks/results [--ranks 4] [--gigabytes 1]

Real ``distill`` jobs under torchrun on the CPU, the teacher computing there or offloaded. What is measured is the proportional
set size of all ranks together while they train: memory that n processes share counts 1/n in each; apart, in mappings of files
with weights and in all others. Of the others, what the same job has with a tiny teacher is subtracted, and what each rank would
have on its card: slots, and weights that are in no block. What is left is for computing, or for copies that should not be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from common import RandomWeights
from kills import ranks_of
from rich.progress import track

from wandistiller.models.load import set_tensor
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.models.tiny import random_tiny_folder

GB = 1e9
STEPS = 6
WORLD = ["--dataset-path", "world:16:1x32x32", "--width", "32", "--height", "32", "--frames", "1", "--max-aspect", "1"]
FLAGS = [*WORLD, "--batch-size", "1", "--workers", "0", "--num-steps", str(STEPS), "--log-every", "1", "--save-every", "0"]
WAYS = ("cpu, float32", "cpu, bfloat16", "offload, float32", "offload, bfloat16", "offload, float8")
NUM_SLOTS = 2
MOST_RATIO = 1.15


@dataclass(frozen=True)
class Teacher:
    """A pipeline with a large transformer of random weights."""

    folder: Path
    num_bytes: int
    block_bytes: int
    rest_bytes: int
    """In no block: embeddings and the like."""


def make_teacher(folder: Path, gigabytes: float, dtype: torch.dtype) -> Teacher:
    """Write one that has about so many gigabytes."""
    folder.mkdir()
    for part in random_tiny_folder().iterdir():
        if part.name != "transformer":
            (folder / part.name).symlink_to(part)
    config = {**SIZES["tiny"].transformer, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960}
    one = build_empty(TRANSFORMER, {**config, "num_layers": 1}, dtype=dtype)
    block_bytes = sum(each.nbytes for each in one.blocks[0].parameters())
    model = build_empty(TRANSFORMER, {**config, "num_layers": round(gigabytes * GB / block_bytes)}, dtype=dtype)
    weights = RandomWeights(model)
    for name in track(list(model.state_dict()), "Writing the teacher"):
        set_tensor(model, name, weights(name).clone())
    model.save_pretrained(folder / "transformer")
    num_bytes = sum(each.nbytes for each in model.parameters())
    return Teacher(folder, num_bytes, block_bytes, num_bytes - len(model.blocks) * block_bytes)


@dataclass(frozen=True)
class Held:
    """Bytes of a process, or of several: in mappings of weights, and all others."""

    weights: int = 0
    others: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.weights + other.weights, self.others + other.others)


def held_by(process: psutil.Process) -> Held:
    """Read proportional set sizes."""
    found, is_weights = Held(), False
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_weights = line.endswith((".weights", ".safetensors"))
        elif line.startswith("Pss:"):
            size = int(line.split()[1]) * 1024
            found += Held(weights=size) if is_weights else Held(others=size)
    return found


def together(processes: list[psutil.Process]) -> Held:
    """Return what processes have in all; they stand still meanwhile, or pages would count for one that others let go."""
    for each in processes:
        each.suspend()
    try:
        return sum((held_by(each) for each in processes), start=Held())
    finally:
        for each in processes:
            each.resume()


def measure(teacher: Path | str, way: str, ranks: int, folder: Path) -> Held:
    """Return the most that the ranks of a job have together while they train, of either kind."""
    launch = ["--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "wandistiller", "distill", *FLAGS]
    command += ["--teacher-path", str(teacher), "--student-config", str(folder / "student.json")]
    strategy, dtype = way.split(", ")
    command += ["--teacher-device-strategy", strategy, "--teacher-dtype", dtype, "--output-dir", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    most = Held()
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        while job.poll() is None:
            # Loading is over when the first step is written down.
            if (folder / "run" / "metrics.jsonl").exists():
                try:
                    now = together(ranks_of(job))
                    most = Held(max(most.weights, now.weights), max(most.others, now.others))
                except (OSError, psutil.Error):  # about to end
                    continue
            time.sleep(0.1)
    if job.returncode:
        sys.exit((folder / "log").read_text()[-4000:])
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for way in arguments.ways:
        strategy, dtype = way.split(", ")
        found = {}
        with tempfile.TemporaryDirectory() as place:
            stored_as = {"float32": torch.float32}.get(dtype, torch.bfloat16)
            teacher = make_teacher(Path(place) / "teacher", arguments.gigabytes, stored_as)
            for name, path in (("tiny", "tiny-random"), ("large", teacher.folder)):
                folder = Path(place) / name
                folder.mkdir()
                (folder / "student.json").write_text(json.dumps({**SIZES["tiny"].transformer, "num_layers": 2}))
                found[name] = measure(path, way, arguments.ranks, folder)
        on_card = arguments.ranks * (NUM_SLOTS * teacher.block_bytes + teacher.rest_bytes) if strategy == "offload" else 0
        row = {
            "way": way,
            "ranks": arguments.ranks,
            "teacher_gb": teacher.num_bytes / GB,
            "weights_in_host_memory_gb": found["large"].weights / GB,
            "on_cards_gb": on_card / GB,
            "other_memory_gb": found["large"].others / GB,
            "other_memory_with_a_tiny_teacher_gb": found["tiny"].others / GB,
            "for_computing_gb": (found["large"].others - found["tiny"].others - on_card) / GB,
        }
        rows.append(row)
        print(
            f"{way:18} teacher of {row['teacher_gb']:.2f} GB, {arguments.ranks} ranks: "
            f"{row['weights_in_host_memory_gb']:.2f} GB of its weights in host memory in all (at most {MOST_RATIO} times its "
            "size is wanted); on cards "
            f"{row['on_cards_gb']:.2f} GB, for computing {row['for_computing_gb']:.2f} GB",
            flush=True,
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "shared-teacher.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
