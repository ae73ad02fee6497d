"""Host memory of four ranks with one teacher: how much more a large teacher takes in all than a tiny one, on one machine.

python benchmarks/shared_teacher.py --output benchmarks/results [--ranks 4] [--gigabytes 1]

Real ``distill`` jobs under torchrun on the CPU, the teacher computing there or offloaded, its 16-bit weights as they are or in
8 bits. What is measured is the proportional set size of all ranks together while they train: memory that n processes share
counts 1/n in each. What the same job takes with a tiny teacher is subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
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
WAYS = {"cpu": [], "offload": [], "offload, 8 bits": ["--teacher-dtype", "float8"]}
MOST_RATIO = 1.15


def make_teacher(folder: Path, gigabytes: float) -> int:
    """Write a pipeline with a transformer of about so many gigabytes in bfloat16; return its bytes."""
    tiny = random_tiny_folder()
    for part in tiny.iterdir():
        if part.name != "transformer":
            (folder / part.name).symlink_to(part)
    config = {**SIZES["tiny"].transformer, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960}
    empty = build_empty(TRANSFORMER, {**config, "num_layers": 1}, dtype=torch.bfloat16)
    a_block = sum(each.numel() * 2 for each in empty.blocks[0].parameters())
    model = build_empty(TRANSFORMER, {**config, "num_layers": round(gigabytes * GB / a_block)}, dtype=torch.bfloat16)
    weights = RandomWeights(model)
    for name in track(list(model.state_dict()), "Writing the teacher"):
        set_tensor(model, name, weights(name).clone())
    model.save_pretrained(folder / "transformer")
    return sum(each.nbytes for each in model.parameters())


def set_size(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


def measure(teacher: Path | str, way: str, ranks: int, folder: Path) -> int:
    """Return the most that the ranks of a job have together while they train."""
    launch = ["--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "wandistiller", "distill", *FLAGS]
    command += ["--teacher-path", str(teacher), "--student-config", str(folder / "student.json")]
    command += ["--teacher-device-strategy", way.split(",", maxsplit=1)[0], *WAYS[way], "--output-dir", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    most = 0
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        while job.poll() is None:
            # Loading is over when the first step is written down.
            if (folder / "run" / "metrics.jsonl").exists():
                try:
                    most = max(most, sum(set_size(each) for each in ranks_of(job)))
                except (OSError, psutil.Error, StopIteration):  # about to end
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
    with tempfile.TemporaryDirectory() as place:
        large = Path(place) / "teacher"
        large.mkdir()
        num_bytes = make_teacher(large, arguments.gigabytes)
        student = dict(SIZES["tiny"].transformer)
        for way in arguments.ways:
            found = {}
            for name, teacher in (("tiny", "tiny-random"), ("large", large)):
                folder = Path(place) / f"{way}-{name}"
                folder.mkdir()
                (folder / "student.json").write_text(json.dumps({**student, "num_layers": 2}))
                found[name] = measure(teacher, way, arguments.ranks, folder)
            stored = num_bytes * (0.52 if "8 bits" in way else 1)
            row = {
                "way": way,
                "ranks": arguments.ranks,
                "teacher_gb": num_bytes / GB,
                "with_a_tiny_teacher_gb": found["tiny"] / GB,
                "with_this_teacher_gb": found["large"] / GB,
                "for_the_teacher_gb": (found["large"] - found["tiny"]) / GB,
                "ratio": (found["large"] - found["tiny"]) / stored,
            }
            rows.append(row)
            print(
                f"{way:18} teacher of {row['teacher_gb']:.2f} GB, {arguments.ranks} ranks: {row['for_the_teacher_gb']:.2f} GB "
                f"for it in all, {row['ratio']:.2f} times what it has (at most {MOST_RATIO} is wanted)",
                flush=True,
            )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "shared-teacher.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
