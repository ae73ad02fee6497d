"""Whole commands on models of real size with random weights: what each said that it would take, and what it took.

python benchmarks/commands.py --folder /tmp/models --output benchmarks/results [--match train] [--small]

``planner.py`` measures steps; here everything around them is in it too: loading, encoding, samples in between, saving.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from wandistiller.memory.estimates import margin
from wandistiller.models.sizes import find_size
from wandistiller.models.tiny import write_random_pipeline
from wandistiller.units import Bytes

PREDICTED = re.compile(r"Predicted: (?:at most|about) ([\d.]+ \w+) on \S+ \(.*?\)(?:, ([\d.e+-]+) s a step)?")
MEASURED = re.compile(r"Measured: ([\d.]+ \w+) on \S+?(?:, ([\d.e+-]+) s a step)?;")
STUDENT = {"hidden_size": 1536, "depth": 12, "num_heads": 12}
SIDES = ((832, 480), (1280, 704))
"""Width and height that each model is usually sampled at."""
SMALL_STUDENT = {"hidden_size": 48, "depth": 2, "num_heads": 2}


def commands(folder: Path, is_small: bool) -> dict[str, list[object]]:
    """Return what is run, by name."""
    small, large = (folder / size for size in sizes(is_small))
    wide, high = (
        ["--width", "64", "--height", "32"] if is_small else ["--width", str(w), "--height", str(h)] for w, h in SIDES
    )
    side, student = 32 if is_small else 128, folder / "student.json"
    student.write_text(json.dumps(SMALL_STUDENT if is_small else STUDENT))

    def world(frames: int, sides: list[str]) -> list[object]:
        size = f"{frames}x{sides[3]}x{sides[1]}"
        return ["--dataset-path", f"world:8:{size}", "--frames", frames, "--max-aspect", 4, *sides]

    steps: list[object] = ["--num-steps", 6, "--log-every", 1, "--workers", 2]
    draw: list[object] = ["--prompt", "a red circle", "--steps", 4, "--output", folder / "drawn.mp4"]
    taught: list[object] = ["--teacher-path", large, "--student-config", student, *steps]
    prompts: list[object] = ["--data-path", "world:8:1x32x32", "--frames", 1, *high, "--num-prompts", 8, "--rollout-steps", 4]
    return {
        "sample, 1.3b, clip": ["sample", "--model", small, *draw, "--frames", 33, *wide],
        "sample, 1.3b, clip, offload": ["sample", "--model", small, *draw, "--frames", 33, *wide, "--placement", "offload"],
        "sample, 5b, clip, tiles": ["sample", "--model", large, *draw, "--frames", 49, *high, "--vae-tiling"],
        "train, 1.3b, pictures, averages, samples": [
            *("train", "--model", small, *world(1, wide), *steps, "--batch-size", 4, "--use-ema"),
            *("--sample-every", 3, "--sample-steps", 2, "--activation-policy", "selective"),
        ],
        "train, 5b, adapters, clips, offload": [
            *("train", "--model", large, *world(17, high), *steps, "--batch-size", 1, "--lora-rank", 16),
            *("--placement", "offload", "--activation-policy", "full"),
        ],
        "distill, 5b to 0.4b, trajectories": [
            *("distill", *taught, *prompts, "--batch-size", 4, "--teacher-device-strategy", "offload"),
            *("--allow-low-coverage", "--guidance-scale", 5),
        ],
        "distill, 5b to 0.4b, clips, features": [
            *("distill", *taught, *world(9, high), "--batch-size", 1, "--feature-weight", 0.5, "--allow-low-coverage"),
            *("--activation-policy", "full"),
        ],
        "train-vae, 1.3b, clips, critic": [
            *("train-vae", "--model", small, "--dataset-path", f"world:8:9x{side}x{side}", "--frames", 9, "--max-aspect", 1),
            *("--width", side, "--height", side, *steps, "--batch-size", 2, "--gan-training", "--statistics-samples", 4),
        ],
    }


def sizes(is_small: bool) -> tuple[str, str]:
    return ("tiny", "tiny") if is_small else ("wan2.1-1.3b", "wan2.2-5b")


def write_models(folder: Path, is_small: bool) -> None:
    """Write pipelines with random weights, made where that is fastest."""
    for name in sizes(is_small):
        if (folder / name / "model_index.json").exists():
            continue
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            torch.set_default_dtype(torch.bfloat16)
            write_random_pipeline(folder / name, find_size(name))
            torch.set_default_dtype(torch.float32)


def run(name: str, command: list[object], folder: Path) -> dict[str, Any] | None:
    """Run a command as a user would, and read what it says; nothing where it fails, which is printed."""
    where: list[object] = [] if command[0] == "sample" else ["--output-dir", folder / re.sub(r"\W+", "-", name)]
    started = time.perf_counter()
    words = [sys.executable, "-m", "wandistiller", *map(str, [*command, *where])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    predicted, measured = PREDICTED.search(done.stderr), MEASURED.search(done.stderr)
    if done.returncode or predicted is None or measured is None:
        print(f"{name}: exit code {done.returncode}\n{' '.join(words)}\n{done.stderr[-3000:]}", flush=True)
        return None
    said, took = Bytes.parse(predicted.group(1)), Bytes.parse(measured.group(1))
    return {
        "what": name,
        "predicted_reserved_gib": said / 2**30,
        "measured_reserved_gib": took / 2**30,
        "predicted_seconds": float(predicted.group(2) or "nan"),
        "measured_seconds": float(measured.group(2) or "nan"),
        "is_memory_within": abs(said - took) <= margin(said),
        "seconds_in_all": time.perf_counter() - started,
    }


def keep(rows: list[dict[str, Any]], failed: list[str], folder: Path) -> None:
    """Write what there is, so that a run that is cut short has kept it."""
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "failed": failed}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commands.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--folder", type=Path, help="where models are written, and found the next time")
    parser.add_argument("--match", default="", help="only those with this expression in their name")
    parser.add_argument("--small", action="store_true", help="tiny models, for trying this without a card; keeps no result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_models(folder, arguments.small)
        rows: list[dict[str, Any]] = []
        failed: list[str] = []
        for name, command in commands(folder, arguments.small).items():
            if not re.search(arguments.match, name):
                continue
            row = run(name, command, folder)
            if row is None:
                failed.append(name)
            else:
                rows.append(row)
                print(
                    f"{name:45} {row['predicted_reserved_gib']:6.1f} / {row['measured_reserved_gib']:6.1f} GiB, "
                    f"{row['predicted_seconds']:6.2f} / {row['measured_seconds']:6.2f} s a step"
                    f"{'' if row['is_memory_within'] else '  MEMORY'} ({row['seconds_in_all']:.0f} s in all)",
                    flush=True,
                )
            if not arguments.small:
                keep(rows, failed, arguments.output)
    if failed:
        sys.exit(f"{len(failed)} failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
