"""Make the pipeline in the box: a tiny Wan that has learnt the procedural world, with this project's own commands.

    python scripts/make_tiny.py --output runs/tiny --graphs --install

takes seventeen minutes on a data-centre GPU. It trains the VAE, on pictures and clips and then mostly on clips, encodes the
world, trains the transformer, and leaves in the output folder the pipeline with weights in 16 bits (``pipeline``), the metrics
of all trainings, and the commands that were run with their times (``commands.txt``). The text encoder is made by hand and needs
no training (see ``models/tiny.py``). ``--install`` puts all of that into the package, where ``--model tiny`` finds it; with an
output folder that is complete it does only that.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file, save_file

from wandistiller.files import complete_or_absent
from wandistiller.models.box import BOX
from wandistiller.models.sizes import find_size
from wandistiller.models.tiny import SEED, write_random_pipeline

SIDE = 64
FRAMES = 9
PICTURES_AND_CLIPS = f"1+{FRAMES}x{SIDE}x{SIDE}"
MOSTLY_CLIPS = f"1+{FRAMES}+{FRAMES}+{FRAMES}x{SIDE}x{SIDE}"
TRAININGS = ("vae", "clips", "train")
"""Folders of the trainings, in their order."""
MOST_BYTES = 12_000_000
"""What the package may carry."""


def main() -> None:
    """Run the stages that have not been run yet, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/tiny"), help="folder for everything")
    parser.add_argument("--vae-steps", type=int, default=6000, help="steps on pictures and clips")
    parser.add_argument("--clip-steps", type=int, default=3600, help="steps mostly on clips after that; 0 for none")
    parser.add_argument("--vae-batch", type=int, default=32)
    parser.add_argument("--vae", type=Path, help="a VAE to go on from, instead of the first of these")
    parser.add_argument("--steps", type=int, default=5000, help="steps of the transformer")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", default="1e-3", help="learning rate of the transformer")
    parser.add_argument("--samples", type=int, default=10000, help="captioned pictures and clips to train it on")
    parser.add_argument("--encoders", type=int, default=6, help="processes that encode at once")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--graphs", action="store_true", help="replay recorded computations; needs a CUDA device")
    parser.add_argument("--install", action="store_true", help="put the result into the package, for --model tiny")
    arguments = parser.parse_args()
    make(arguments)
    if arguments.install:
        install(arguments.output, BOX)


def make(arguments: argparse.Namespace) -> None:
    """Leave the pipeline and everything that tells how it came about; nothing is done where it is there already."""
    output: Path = arguments.output
    start, learner = output / "start", output / "learner"
    if (output / "pipeline").exists():
        return
    if not start.exists():
        write_random_pipeline(start, find_size("tiny-world"))
    run = Commands(output / "commands.txt")
    run.note(f"{shlex.join(sys.argv)}: starts from random weights of seed {SEED}; wandistiller's own seeds are below")
    if not learner.exists():
        vae = train_vae(arguments, run, start)
        shutil.copytree(start, learner, ignore=shutil.ignore_patterns("vae"))
        shutil.copytree(vae, learner / "vae")
    train_transformer(arguments, run, learner)
    with complete_or_absent(output / "pipeline") as partial:
        shutil.copytree(output / "train" / "model", partial, dirs_exist_ok=True)
        for weights in partial.glob("*/*.safetensors"):
            halve(weights)


def install(output: Path, box: Path) -> None:
    """Put the pipeline and what tells how it came about into the package, in the place of what was there."""
    size = sum(file.stat().st_size for file in (output / "pipeline").rglob("*") if file.is_file())
    if size > MOST_BYTES:
        sys.exit(f"{output / 'pipeline'} has {size / 1e6:.1f} MB; the package may carry {MOST_BYTES / 1e6:.0f} MB.")
    shutil.rmtree(box, ignore_errors=True)
    shutil.copytree(output / "pipeline", box / "pipeline")
    shutil.copy(output / "commands.txt", box)
    for name in TRAININGS:
        metrics = output / name / "metrics.jsonl"
        if metrics.is_file():
            shutil.copy(metrics, box / f"{name}.jsonl")
    print(f"{box}: {size / 1e6:.1f} MB")


def common(arguments: argparse.Namespace) -> list[str]:
    """Return the flags that all stages have."""
    size = ["--width", str(SIDE), "--height", str(SIDE), "--frames", str(FRAMES), "--max_aspect", "1"]
    return [*size, "--device", arguments.device]


def training(arguments: argparse.Namespace, steps: int, looks: int) -> list[str]:
    """Return the flags that all trainings have; ``looks`` is how often the held-out data are looked at."""
    flags = ["--num_steps", str(steps), "--validate_every", str(max(steps // looks, 1)), "--save_every", "0"]
    flags += ["--lr_schedule", "cosine", "--use_ema", "--log_every", "100", "--workers", str(arguments.workers)]
    return [*flags, *(["--cuda_graphs"] if arguments.graphs else [])]


def train_vae(arguments: argparse.Namespace, run: Commands, start: Path) -> Path:
    """Train the VAE, and return its folder."""
    output: Path = arguments.output
    losses = ["--mixed_precision", "no", "--high_frequency_weight", "1", "--kl_beta", "1e-4", "--ema_decay", "0.998"]
    held_out = ["--held_out", f"world-heldout:64:{PICTURES_AND_CLIPS}", "--batch_size", str(arguments.vae_batch)]
    vae = arguments.vae or output / "vae" / "vae"
    if arguments.vae is None:
        run(
            ["train-vae", "--model", str(start), "--from_scratch", "--dataset_path", f"world:200000:{PICTURES_AND_CLIPS}"],
            ["--seed", "0", *held_out, "--output_dir", str(output / "vae"), *common(arguments), *losses],
            [*training(arguments, arguments.vae_steps, 6), "--learning_rate", "2e-3", "--warmup_steps", "200"],
        )
    if not arguments.clip_steps:
        return vae
    run(
        ["train-vae", "--model", str(vae), "--dataset_path", f"world:200000:{MOSTLY_CLIPS}", "--seed", "1"],
        [*held_out, "--output_dir", str(output / "clips"), *common(arguments), *losses],
        [*training(arguments, arguments.clip_steps, 4), "--learning_rate", "1e-3", "--warmup_steps", "100"],
    )
    return output / "clips" / "vae"


def train_transformer(arguments: argparse.Namespace, run: Commands, learner: Path) -> None:
    """Encode the world and train the transformer on it."""
    output: Path = arguments.output
    data, held_out = f"world:{arguments.samples}:{PICTURES_AND_CLIPS}", f"world-heldout:256:{PICTURES_AND_CLIPS}"
    for part, cache in ((data, "cache"), (held_out, "cache/.held_out")):
        encode = ["encode", "--model", str(learner), "--dataset_path", part, "--cache_dir", str(output / cache)]
        run([*encode, "--text_batch_size", "256", "--batch_size", "128"], common(arguments), times=arguments.encoders)
    run(
        ["train", "--model", str(learner), "--from_scratch", "--dataset_path", data, "--cache_dir", str(output / "cache")],
        ["--held_out", held_out, "--judge_samples", "256", "--output_dir", str(output / "train"), *common(arguments)],
        [*training(arguments, arguments.steps, 4), "--learning_rate", arguments.rate, "--warmup_steps", "500"],
        ["--batch_size", str(arguments.batch), "--beta2", "0.99", "--sigma_shift", "3", "--seed", "0"],
    )


def halve(weights: Path) -> None:
    """Store weights in float16: a tenth of a percent is more than they are known to."""
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})


class Commands:
    """Runs commands and notes them."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __call__(self, *parts: list[str], times: int = 1) -> None:
        """Run a command, several of it at once where it shares its work."""
        arguments = [argument for part in parts for argument in part]
        started = time.perf_counter()
        command = [sys.executable, "-m", "wandistiller", *arguments]
        # Threads of several processes that wait for each other on the same cores would take most of the time.
        threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // times, 1))} if times > 1 else {}
        running = [subprocess.Popen(command, env={**os.environ, **threads}) for _ in range(times)]
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit(f"This failed: {shlex.join(command)}")
        self._write(f"wandistiller {shlex.join(arguments)}  # {time.perf_counter() - started:.0f} s")

    def note(self, text: str) -> None:
        """Note what the commands do not say."""
        self._write(f"# {text}")

    def _write(self, line: str) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")


if __name__ == "__main__":
    main()
