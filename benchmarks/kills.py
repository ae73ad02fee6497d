"""One of four ranks killed at random moments, again and again: the job comes back each time and ends with the same weights.

python benchmarks/kills.py --output benchmarks/results [--kills 30] [--parallel fsdp]

A job of four ranks on the CPU trains under ``torchrun --max-restarts``. Whenever it has ranks, one is killed with SIGKILL at a
random moment: while it starts, computes or saves. After the last kill it trains to its end. Every state that is there after a
kill is complete or does not count; the weights are those of a job that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from wandistiller.checkpoint.training_state import TrainingStates, is_complete

STEPS = 200
WORLD = ["--dataset-path", "world:16:1x32x32", "--width", "32", "--height", "32", "--frames", "1", "--max-aspect", "1"]
FLAGS = ["--model", "tiny-random", *WORLD, "--batch-size", "1", "--learning-rate", "1e-3", "--workers", "0"]
FLAGS += ["--num-steps", str(STEPS), "--save-every", "5", "--validate-every", "0", "--log-every", "50"]


def start(folder: Path, parallel: str, restarts: int) -> subprocess.Popen[str]:
    launch = ["--standalone", "--nproc-per-node=4", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "wandistiller", "train", *FLAGS]
    command += ["--parallel", parallel, "--output-dir", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("w")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment)


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    def is_rank(process: psutil.Process) -> bool:
        try:
            return "wandistiller" in process.cmdline()
        except psutil.Error:  # gone, or about to be
            return False

    return [each for each in psutil.Process(job.pid).children() if is_rank(each)]


def disturb(job: subprocess.Popen[str], states: Path, kills: int, rng: random.Random) -> list[int]:
    """Kill; return the step of the newest state at each kill."""
    found, killed_before = [], set()
    while len(found) < kills:
        ranks = ranks_of(job)
        if job.poll() is not None:
            sys.exit(f"The job ended after {len(found)} kills, with {job.returncode}.")
        if len(ranks) < 4 or killed_before & {each.pid for each in ranks}:
            time.sleep(0.05)
            continue
        wait(states, found[-1] if found else 0, rng, is_training=len(found) % 3 != 0)
        victim = rng.choice(ranks)
        if not victim.is_running():
            continue
        killed_before.add(victim.pid)
        os.kill(victim.pid, signal.SIGKILL)
        broken = [path.name for path in states.glob("step-*") if (path / "state.json").exists() and not is_complete(path)]
        if broken:
            sys.exit(f"Not complete: {broken}")
        found.append(newest_step(states))
        print(f"kill {len(found)}: a rank of four, newest state of step {found[-1]}", flush=True)
    return found


def newest_step(states: Path) -> int:
    newest = TrainingStates(states, keep=2).newest()
    return 0 if newest is None else int(newest.name.rpartition("-")[2])


def wait(states: Path, since: int, rng: random.Random, *, is_training: bool) -> None:
    """Wait for a random moment: while the job starts, or after it has trained further than the last time."""
    if not is_training:
        time.sleep(rng.uniform(0, 12))
        return
    deadline = time.monotonic() + 120
    while newest_step(states) <= since and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 1))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "model" / "transformer" / "diffusion_pytorch_model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="fsdp")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        disturbed, quiet = Path(temporary, "disturbed"), Path(temporary, "quiet")
        for folder in (disturbed, quiet):
            folder.mkdir()
        started = time.perf_counter()
        job = start(disturbed, arguments.parallel, arguments.kills + 5)
        steps = disturb(job, disturbed / "run" / "states", arguments.kills, random.Random(0))
        if job.wait():
            sys.exit((disturbed / "log").read_text()[-4000:])
        seconds = time.perf_counter() - started
        if start(quiet, arguments.parallel, 0).wait():
            sys.exit((quiet / "log").read_text()[-4000:])
        found, expected = weights(disturbed), weights(quiet)
    same = all(torch.equal(found[name], expected[name]) for name in expected)
    print(f"{arguments.kills} kills in {seconds:.0f} s; the weights are {'' if same else 'NOT '}those of an undisturbed job")
    arguments.output.mkdir(parents=True, exist_ok=True)
    facts = {"ranks": 4, "parallel": arguments.parallel, "kills": arguments.kills, "seconds": round(seconds), "is_equal": same}
    file = arguments.output / f"kills-{arguments.parallel}.json"
    file.write_text(json.dumps({"torch": torch.__version__, **facts, "newest_state_at_each_kill": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
