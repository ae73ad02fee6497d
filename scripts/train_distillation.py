"""Distil a teacher: the flags of ``wandistiller distill``, for those who are used to a script.

python scripts/train_distillation.py --teacher_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --student_config student_config.json \
    --data_path prompts.txt --output_dir runs/distill --batch_size 4 --num_steps 10000 --lr 1e-4 --teacher_on_cpu
torchrun --nproc-per-node 4 scripts/train_distillation.py ... --distributed

``--multi_gpu`` starts torchrun itself, with one process for each GPU of this machine.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from wandistiller.cli.arguments import parse_flags
from wandistiller.cli.main import start
from wandistiller.config.distill import DistillConfig

NAMES = {
    "--lr": "--learning-rate",
    "--num-workers": "--workers",
    "--sample-interval": "--sample-every",
}
"""Flags that are called otherwise in ``wandistiller distill``."""

USUAL_SAMPLE_INTERVAL = "500"

OWN_FLAGS = {
    **{"--" + name[2:].replace("-", "_"): f"the same as {flag}" for name, flag in NAMES.items()},
    "--save_samples": f"draw samples, every {USUAL_SAMPLE_INTERVAL} steps unless --sample_interval says otherwise",
    "--multi_gpu": "start torchrun with one process for each GPU of this machine",
    "--mixed_precision": "may stand without a value, for auto",
}
"""What this script knows besides, for its help."""


def translated(arguments: list[str]) -> list[str]:
    """Return the flags of ``wandistiller distill`` for those of this script."""
    found: list[str] = []
    saves_samples = False
    for place, argument in enumerate(arguments):
        if not argument.startswith("--"):
            found.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name == "--save-samples":
            saves_samples = True
            continue
        found.append(NAMES.get(name, name) + equals + value)
        following = arguments[place + 1] if place + 1 < len(arguments) else "--"
        if name == "--mixed-precision" and not equals and following.startswith("--"):
            found.append("auto")
    if saves_samples and not any(flag.split("=")[0] == "--sample-every" for flag in found):
        found += ["--sample-every", USUAL_SAMPLE_INTERVAL]
    return found


def launch_on_all_gpus(arguments: list[str]) -> None:
    """Become torchrun with a process for each GPU, where there are several."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        print(f"--multi_gpu: this machine has {count} GPUs; going on with one process", file=sys.stderr)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", __file__]
    os.execv(sys.executable, [*command, *arguments])


def print_help() -> NoReturn:
    """Show the flags of this script, then those of ``wandistiller distill``, and end."""
    width = max(map(len, OWN_FLAGS))
    try:
        print("Distil a teacher: the flags of wandistiller distill, which follow, and\n")
        print(*(f"  {name:<{width}}  {text}" for name, text in OWN_FLAGS.items()), "", sep="\n", flush=True)
        parse_flags(DistillConfig, ["--help"], DistillConfig(), Path(__file__).name)
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print_help()
    given = [argument for argument in sys.argv[1:] if argument.replace("_", "-") != "--multi-gpu"]
    if len(given) < len(sys.argv) - 1 and "RANK" not in os.environ:
        launch_on_all_gpus(given)
    sys.exit(start(["distill", *translated(given)]))
