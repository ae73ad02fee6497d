"""What today's program predicts for what was measured on a card and kept: no card is needed.

python benchmarks/again.py [planner.json planner-untried-22.json ...] [--workers 2]

Times are predicted with the rates that were measured beside each trial, where these were kept. Predictions of memory are for
the PyTorch that makes them: those of float32 weights are a tenth off where it is another than the results name.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from planner import GIB, Predicted, is_near, predict
from tried import KINDS
from untried import untried

from wandistiller.memory.estimates import margin
from wandistiller.memory.hardware import H200, Hardware
from wandistiller.plan.trial_steps import Work
from wandistiller.units import Bytes

RESULTS = Path(__file__).parent / "results"
_GIGA, _TERA = 1e9, 1e12
_RATES = {
    "bus_gb_per_second": ("bus_rate", _GIGA),
    "disk_gb_per_second": ("disk_rate", _GIGA),
    "host_gb_per_second": ("host_rate", _GIGA),
    "host_tflops": ("host_flops", _TERA),
    "host_attention_tflops": ("host_attention", _TERA),
    "host_values_gb_per_second": ("host_bandwidth", _GIGA),
}
"""As results have them, and where a machine has them."""
_DRAWN = 64
"""As many as were ever drawn with one seed."""


def machine(kept: dict[str, Any]) -> Hardware:
    """Return the machine on which something was measured."""
    rates = {field: kept[name] * unit for name, (field, unit) in _RATES.items() if name in kept}
    launch = kept["launch_microseconds"] / 1e6 if "launch_microseconds" in kept else H200.launch_seconds
    return Hardware(card=replace(H200, launch_seconds=launch), host_memory=Bytes(2**37), **rates)


def measured(file: Path) -> Iterator[tuple[dict[str, Any], Work, Hardware]]:
    """Yield what was measured, what it was, and on which machine."""
    content = json.loads(file.read_text())
    for row in content["rows"]:
        is_drawn = row["job"] == "untried"
        works = dict(untried(int(row["what"].split(".")[0]), _DRAWN) if is_drawn else KINDS[row["job"]]())
        if row["what"] in works:
            yield row, works[row["what"]], machine({**content, **row.get("before", {}), **row.get("beside", {})})
        else:
            print(f"{row['job']:8} {row['what'][:60]:60} is no more", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=sorted(each.name for each in RESULTS.glob("planner*.json")))
    parser.add_argument("--workers", type=int, default=2, help="processes that predict; with 1, this one")
    arguments = parser.parse_args()
    for name in arguments.files:
        kept = json.loads((RESULTS / name).read_text())
        print(f"{name}, measured with torch {kept['torch']}, predicted with torch {torch.__version__}", flush=True)
        os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{kept['expandable_segments']}"
        rows = list(measured(RESULTS / name))
        works, machines = [work for _, work, _ in rows], [machine for _, _, machine in rows]
        if arguments.workers > 1:
            with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
                found = list(pool.map(predict, works, machines))
        else:
            found = list(map(predict, works, machines))
        near = [show(row, said) for (row, _, _), said in zip(rows, found, strict=True)]
        memory, times = (sum(each) for each in zip(*near, strict=True))
        print(f"{len(near)} trials: memory within its bound in {memory}, time in {times}", flush=True)


def show(row: dict[str, Any], said: Predicted) -> tuple[bool, bool]:
    """Print predicted against measured; say whether memory and time are within their bounds."""
    reserved = row["measured_reserved_gib"]
    is_within = abs(reserved * GIB - said.reserved) <= margin(Bytes(said.reserved))
    is_in_time = is_near(row["measured_seconds"], said.seconds)
    print(
        f"{row['job']:8} {row['what'][:60]:60} reserved {said.reserved / GIB:7.2f} / {reserved:7.2f} GiB "
        f"step {said.seconds:8.3f} / {row['measured_seconds']:8.3f} s "
        f"{'' if is_within else 'MEMORY '}{'' if is_in_time else 'TIME '}({said.limit})",
        flush=True,
    )
    return is_within, is_in_time


if __name__ == "__main__":
    main()
