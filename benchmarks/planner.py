"""Predicted against measured: memory and time of every job, several sizes, lengths, placements and policies, in one run.

python benchmarks/planner.py --output benchmarks/results [--only sample train distill vae] [--match offload] [--small]
python benchmarks/planner.py --untried 30 --seed 7      configurations drawn at random, instead of the chosen ones
python benchmarks/planner.py --predict FILE      beforehand, for an H200, on any machine
python benchmarks/planner.py --against FILE      on the card, which then does not wait for predictions before it begins

Otherwise the predictions are made first; times are predicted again at the end. The bounds: what is reserved within 3 % or
300 MiB of the prediction, whichever is larger; a step's time within 15 %. A run measures the machine when it begins and says
its prediction then: times are predicted with the rates just before each trial, and, on a host that others use, also with those
between the trial's steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tried import KINDS, small
from untried import untried

from wandistiller.cli.main import let_segments_grow
from wandistiller.memory.allocator_model import expandable_segments
from wandistiller.memory.device_map import reads_files
from wandistiller.memory.estimates import fits_host, margin
from wandistiller.memory.hardware import H200, Hardware, detect
from wandistiller.memory.rates import Launches, elementwise_rate, matmul_rate, update_rate
from wandistiller.memory.raw_reads import read_rate
from wandistiller.memory.step_limit import limit_of
from wandistiller.memory.works import Passes, Training
from wandistiller.plan.trial import Measured, try_out
from wandistiller.plan.trial_steps import Work
from wandistiller.units import Bytes

GIB = 2**30
_CPU = torch.device("cpu")
_FIELDS = {
    "disk": "disk_rate",
    "updates": "host_rate",
    "flops": "host_flops",
    "attention": "host_attention",
    "values": "host_bandwidth",
}
"""What is measured beside a trial, and where a machine has it."""
_MOMENTS = {"before": "", "beside": "_beside"}
"""When a machine's rates are measured, and how the names of the times end that are predicted with them."""
_VERDICTS = ("memory_within", "time_within", "time_within_beside")
Named = tuple[str, str, Work]
"""A kind, a name, and what it is."""


@dataclass(frozen=True)
class Predicted:
    """What was said beforehand, in the words of ``plan.trial.Measured``."""

    allocated: int
    reserved: int
    page_locked: int
    seconds: float
    limit: str | None
    """What the steps wait for most."""
    planning_seconds: float


def predict(work: Work, hardware: Hardware) -> Predicted:
    torch.set_num_threads(1)
    started = time.perf_counter()
    phase = work.phase(hardware)
    planning = time.perf_counter() - started
    limit = limit_of(phase, hardware)
    return Predicted(phase.peak, phase.reserved, phase.total("page-locked"), phase.seconds, limit, planning)


def beforehand(file: Path, works: list[Named], hardware: Hardware, workers: int) -> None:
    """Write down what is predicted, for a card of which only the name is known."""
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        predictions = [pool.submit(predict, work, hardware) for _, _, work in works]
        for (kind, name, work), prediction in zip(works, predictions, strict=True):
            found[f"{kind}: {name}"] = {"work": repr(work), **asdict(prediction.result())}
            print(f"{kind:8} {name:52} {prediction.result()}", flush=True)
            file.write_text(json.dumps(found, indent=1) + "\n")


def read_beforehand(file: Path | None, kind: str, name: str, work: Work) -> Predicted | None:
    """Return what was predicted for just this work."""
    content = {} if file is None else json.loads(file.read_text())
    found = content.get(f"{kind}: {name}", {"work": None})
    return Predicted(**found) if found.pop("work") == repr(work) else None


def row_of(kind: str, name: str, predicted: Predicted, measured: Measured) -> dict[str, Any]:
    return {
        "job": kind,
        "what": name,
        "predicted_reserved_gib": predicted.reserved / GIB,
        "measured_reserved_gib": measured.reserved / GIB,
        "predicted_allocated_gib": predicted.allocated / GIB,
        "measured_allocated_gib": measured.allocated / GIB,
        "predicted_seconds": predicted.seconds,
        "measured_seconds": measured.seconds,
        "predicted_page_locked_gib": predicted.page_locked / GIB,
        "measured_page_locked_gib": measured.page_locked / GIB,
        "limited_by": predicted.limit,
        "is_memory_within": abs(measured.reserved - predicted.reserved) <= margin(Bytes(predicted.reserved)),
        "is_time_within": is_near(measured.seconds, predicted.seconds),
        "planning_seconds": predicted.planning_seconds,
    }


def is_near(measured: float, predicted: float) -> bool:
    return predicted > 0 and abs(measured / predicted - 1) <= 0.15


def rates_of(hardware: Hardware) -> dict[str, float]:
    return {
        "bus_gb_per_second": hardware.bus_rate / 1e9,
        "disk_gb_per_second": hardware.disk_rate / 1e9,
        "host_gb_per_second": hardware.update_rate / 1e9,
        "host_tflops": hardware.host_flops / 1e12,
        "host_attention_tflops": hardware.host_attention / 1e12,
        "host_values_gb_per_second": hardware.host_bandwidth / 1e9,
        "launch_microseconds": 1e6 * hardware.card.launch_seconds if hardware.card is not None else 0.0,
    }


class Results:
    """The table, which is printed and kept row by row: a run that is cut short has shown what it has."""

    def __init__(self, file: Path, device: torch.device, hardware: Hardware) -> None:
        self._file = file
        self._facts = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "expandable_segments": expandable_segments(),
            **rates_of(hardware),
        }
        self._rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.left_out: list[str] = []
        """What there was no time for, or no host memory."""

    def add(self, row: dict[str, Any], seconds: float) -> None:
        self._rows.append(row)
        print(
            f"{row['job']:8} {row['what']:52} "
            f"reserved {row['predicted_reserved_gib']:7.2f} / {row['measured_reserved_gib']:7.2f} "
            f"in use {row['predicted_allocated_gib']:7.2f} / {row['measured_allocated_gib']:7.2f} GiB "
            f"locked {row['predicted_page_locked_gib']:5.1f} / {row['measured_page_locked_gib']:5.1f} "
            f"step {row['predicted_seconds']:8.3f} / {row['measured_seconds']:8.3f} s "
            f"{'' if row['is_memory_within'] else 'MEMORY '}{'' if row['is_time_within'] else 'TIME '}({seconds:.0f} s)",
            flush=True,
        )
        self._write()

    def judge_times(self, moments: dict[str, list[Hardware]], predictions: dict[str, list[Predicted]]) -> None:
        """Take up what is predicted with the rates that the machine had before each trial and beside it."""
        for index, row in enumerate(self._rows):
            for moment, end in _MOMENTS.items():
                said = predictions[moment][index]
                row[moment] = rates_of(moments[moment][index])
                row[f"predicted_seconds{end}"] = said.seconds
                row[f"is_time_within{end}"] = is_near(row["measured_seconds"], said.seconds)
            row["limited_by"] = predictions["before"][index].limit
            if not row["is_time_within_beside"] or not row["is_time_within"]:
                was = f"{row['predicted_seconds']:.3f}, with the rates beside it {row['predicted_seconds_beside']:.3f}"
                print(f"{row['job']:8} {row['what']:52} predicted {was}, measured {row['measured_seconds']:.3f} s", flush=True)
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(
            json.dumps({**self._facts, "failed": self.failed, "left_out": self.left_out, "rows": self._rows}, indent=1) + "\n"
        )

    def leave_out(self, kind: str, name: str) -> None:
        self.left_out.append(f"{kind}: {name}")
        self._write()

    def fail(self, kind: str, name: str, error: Exception) -> None:
        self.failed.append(name)
        print(f"{kind:8} {name:52} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        self._write()

    def __str__(self) -> str:
        count = {name: sum(row.get(f"is_{name}", False) for row in self._rows) for name in _VERDICTS}
        rest = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        times = f"time in {count['time_within']}, {count['time_within_beside']} with the rates beside them"
        lines = [f"{len(self._rows)} configurations: memory within its bound in {count['memory_within']}, {times}{rest}"]
        for limit in dict.fromkeys(row["limited_by"] for row in self._rows):
            rows = [row for row in self._rows if row["limited_by"] == limit]
            near, beside = (sum(row.get(f"is_{name}", False) for row in rows) for name in _VERDICTS[1:])
            lines.append(
                f"  limited by {limit or 'what was not asked'}: time in {near} of {len(rows)}, {beside} with the rates beside"
            )
        return "\n".join(lines)


class Moment:
    """A machine's rates when something is tried on it: what others do on its host and disk changes them all the time."""

    def __init__(self, work: Work, hardware: Hardware, launches: Launches) -> None:
        self._work = work
        self._hardware = hardware
        self._launches = launches
        self._rates = defaultdict[str, list[float]](list)

    def look(self, files: Sequence[Path]) -> None:
        """Measure what the work waits for, between two of its steps."""
        if self._is_on_cpu:
            matmul_rate.cache_clear()
            elementwise_rate.cache_clear()
            self._rates["flops"].append(matmul_rate(_CPU, self._work.use.dtype))
            self._rates["attention"].append(matmul_rate(_CPU, torch.float32))
            self._rates["values"].append(elementwise_rate(self._work.use.dtype))
        elif not self._updates_on_host:  # that goes on between steps
            self._rates["launches"].append(1 / self._launches.seconds(least=0.1))
        if files:
            time.sleep(1)  # the first blocks of the next step are read
            self._rates["disk"].append(read_rate(files, at_most=2**33, seconds=4))

    @property
    def _is_on_cpu(self) -> bool:
        return isinstance(self._work, Passes) and self._work.placing.name == "cpu"

    @property
    def _updates_on_host(self) -> bool:
        return isinstance(self._work, Training) and self._work.is_on_host

    def hardware(self) -> Hardware:
        """Return the machine as it was then, when nothing else goes on."""
        if self._updates_on_host:
            update_rate.cache_clear()
            self._rates["updates"].append(update_rate())
        found = {name: statistics.median(rates) for name, rates in self._rates.items()}
        changes: dict[str, Any] = {field: found[name] for name, field in _FIELDS.items() if name in found}
        if self._hardware.card is not None and "launches" in found:
            changes["card"] = replace(self._hardware.card, launch_seconds=1 / found["launches"])
        return replace(self._hardware, **changes)


def compare(works: list[Named], arguments: argparse.Namespace, device: torch.device, hardware: Hardware) -> Results:
    """Measure one after the other what was predicted, all of it before: the host has other things to do while it predicts."""
    chosen = "-" + "-".join(arguments.only) if len(arguments.only) < len(KINDS) else ""
    name_of_kinds = f"-untried-{arguments.seed}" if arguments.untried else chosen
    results = Results(arguments.output / f"planner{name_of_kinds}.json", device, hardware)
    started = time.perf_counter()
    launches, tried = Launches(device), list[Work]()
    moments: dict[str, list[Hardware]] = {moment: [] for moment in _MOMENTS}
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        predictions = [
            read_beforehand(arguments.against, *work) or pool.submit(predict, work[2], hardware).result for work in works
        ]
        predicted = [each if isinstance(each, Predicted) else each() for each in predictions]
        print(f"predicted after {time.perf_counter() - started:.0f} s", flush=True)
        for (kind, name, work), said in zip(works, predicted, strict=True):
            begun = time.perf_counter()
            is_late = begun - started > arguments.budget
            if is_late or said.seconds > arguments.longest or not fits_host(said.page_locked, hardware):
                results.leave_out(kind, name)
                continue
            before, beside = (Moment(work, hardware, launches) for _ in _MOMENTS)
            try:
                with files_to_read(work) as files:
                    before.look(files)
                as_it_began = before.hardware()
                measured = try_out(work, device, num_steps=3, between=beside.look)
            except Exception as error:  # noqa: BLE001 - the others are still worth measuring
                results.fail(kind, name, error)
                continue
            torch._dynamo.reset()
            results.add(row_of(kind, name, said, measured), time.perf_counter() - begun)
            tried.append(work)
            moments["before"].append(as_it_began)
            moments["beside"].append(beside.hardware())
        again = {moment: pool.map(predict, tried, machines) for moment, machines in moments.items()}
        results.judge_times(moments, {moment: list(found) for moment, found in again.items()})
    return results


def is_read_from_disk(work: Work) -> bool:
    placings = [work.placing] if isinstance(work, Passes | Training) else []
    placings += [work.teacher_placing] if isinstance(work, Training) else []
    return any(reads_files(placing.name, placing.device_map) for placing in placings)


@contextmanager
def files_to_read(work: Work | None = None) -> Iterator[list[Path]]:
    """Give a file on the disk that trials write to; none for work that does not stream from it."""
    if work is not None and not is_read_from_disk(work):
        yield []
        return
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(64):
            file.write(os.urandom(2**24))
        file.flush()
        os.fsync(file.fileno())
        yield [Path(file.name)]


def disk_rate() -> float:
    with files_to_read() as files:
        return read_rate(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--untried", type=int, default=0, help="so many drawn at random, instead of those that were chosen")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn with")
    parser.add_argument(
        "--match", default="", help="take only what has this expression in its kind and name, as train: 5b video"
    )
    parser.add_argument("--skip", default="\0", help="leave out what has this in its name")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no other one is begun")
    parser.add_argument("--longest", type=float, default=60, help="seconds a step that are too long to wait for")
    parser.add_argument("--predict", type=Path, help="only predict, and write the predictions to this file")
    parser.add_argument("--against", type=Path, help="the file of predictions made beforehand")
    parser.add_argument("--workers", type=int, default=4, help="processes that predict")
    parser.add_argument("--bus", type=float, default=55.4, help="GB a second over the bus, for --predict")
    parser.add_argument("--host", type=float, default=92.0, help="GB a second of updates on the host, for --predict")
    parser.add_argument("--small", action="store_true", help="tiny models, for trying this without a card")
    arguments = parser.parse_args()
    let_segments_grow()  # as the program does
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware = Hardware(card=H200, host_memory=Bytes(2**37))
    if device.type == "cuda":
        hardware = detect()
        # Measured here once: those that predict beside each other would measure each other's work.
        hardware = replace(hardware, disk_rate=disk_rate(), host_rate=hardware.update_rate)
    kinds = KINDS | {"untried": partial(untried, arguments.seed, arguments.untried)}
    works = [
        (kind, name, found)
        for kind in (["untried"] if arguments.untried else arguments.only)
        for name, work in kinds[kind]()
        if re.search(arguments.match, f"{kind}: {name}") and arguments.skip not in name
        if (found := small(name, work) if arguments.small else work) is not None
    ]
    if arguments.predict is not None:
        rates = {"bus_rate": arguments.bus * 1e9, "host_rate": arguments.host * 1e9}
        beforehand(arguments.predict, works, replace(hardware, **rates), arguments.workers)
        return
    results = compare(works, arguments, device, hardware)
    print(results)
    if results.failed:
        sys.exit(f"{len(results.failed)} failed: {'; '.join(results.failed)}")


if __name__ == "__main__":
    main()
