"""Make the pipeline in the box: a tiny Wan that has learnt the procedural world, with this project's own commands.

    python scripts/make_tiny.py --output runs/tiny

takes about ten minutes on a data-centre GPU. It trains the VAE, encodes the world, trains the transformer, and leaves in the
output folder the pipeline (``pipeline``), the metrics of both trainings, and the commands that were run (``commands.txt``).
The text encoder is made by hand and needs no training (see ``models/tiny.py``).
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from wandistiller.models.sizes import find_size
from wandistiller.models.tiny import write_random_pipeline

SIDE = 64
FRAMES = 9


def main() -> None:
    """Run the four stages, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/tiny"), help="folder for everything")
    parser.add_argument("--vae-steps", type=int, default=8000)
    parser.add_argument("--vae-batch", type=int, default=32)
    parser.add_argument("--vae-rate", default="2e-3")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", default="1e-3")
    parser.add_argument("--samples", type=int, default=20000, help="captioned pictures and clips to train on")
    parser.add_argument("--encoders", type=int, default=4, help="processes that encode at once")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--vae", type=Path, help="a VAE that is trained already")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--graphs", action="store_true", help="replay recorded computations; needs a CUDA device")
    arguments = parser.parse_args()
    make(arguments)


def make(arguments: argparse.Namespace) -> None:
    """Leave the pipeline and everything that tells how it came about."""
    output: Path = arguments.output
    start = output / "start"
    if not start.exists():
        write_random_pipeline(start, find_size("tiny-world"))
    shape = f"1+{FRAMES}x{SIDE}x{SIDE}"
    common = ["--width", str(SIDE), "--height", str(SIDE), "--frames", str(FRAMES), "--max_aspect", "1"]
    common += ["--device", arguments.device]
    graphs = ["--cuda_graphs"] if arguments.graphs else []
    run = Commands(output / "commands.txt")
    vae = arguments.vae or output / "vae" / "vae"
    if arguments.vae is None:
        run(
            ["train-vae", "--model", str(start), "--from_scratch", "--dataset_path", f"world:200000:{shape}"],
            ["--held_out", f"world-heldout:64:{shape}", "--output_dir", str(output / "vae"), *common],
            ["--num_steps", str(arguments.vae_steps), "--batch_size", str(arguments.vae_batch)],
            ["--learning_rate", arguments.vae_rate, "--lr_schedule", "cosine", "--warmup_steps", "200"],
            ["--mixed_precision", "no", "--high_frequency_weight", "1", "--kl_beta", "1e-4"],
            ["--use_ema", "--ema_decay", "0.998", "--workers", str(arguments.workers), *graphs],
            ["--validate_every", str(max(arguments.vae_steps // 6, 1)), "--save_every", "0", "--log_every", "100"],
        )
    learner = output / "learner"
    if not learner.exists():
        shutil.copytree(start, learner, ignore=shutil.ignore_patterns("vae"))
        shutil.copytree(vae, learner / "vae")
    training, held_out = f"world:{arguments.samples}:{shape}", f"world-heldout:256:{shape}"
    for data, cache in ((training, "cache"), (held_out, "cache/held_out")):
        encode = ["encode", "--model", str(learner), "--dataset_path", data, "--cache_dir", str(output / cache)]
        run(encode, ["--text_batch_size", "256", "--batch_size", "128", *common], times=arguments.encoders)
    run(
        ["train", "--model", str(learner), "--from_scratch", "--dataset_path", training, "--cache_dir", str(output / "cache")],
        ["--held_out", held_out, "--judge_samples", "256", "--output_dir", str(output / "train"), *common],
        ["--num_steps", str(arguments.steps), "--batch_size", str(arguments.batch), "--learning_rate", arguments.rate],
        ["--lr_schedule", "cosine", "--warmup_steps", "500", "--beta2", "0.99", "--sigma_shift", "3", "--use_ema"],
        ["--validate_every", str(max(arguments.steps // 8, 1)), "--save_every", "0", "--log_every", "100"],
        ["--workers", str(arguments.workers), *graphs],
    )
    shutil.copytree(output / "train" / "model", output / "pipeline", dirs_exist_ok=True)


class Commands:
    """Runs commands and notes them."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __call__(self, *parts: list[str], times: int = 1) -> None:
        """Run a command, several of it at once where it shares its work."""
        arguments = [argument for part in parts for argument in part]
        started = time.perf_counter()
        command = [sys.executable, "-m", "wandistiller", *arguments]
        running = [subprocess.Popen(command) for _ in range(times)]
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit(f"This failed: {shlex.join(command)}")
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"wandistiller {shlex.join(arguments)}  # {time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
