"""Fine-tune with flow matching: the flags of ``wandistiller train``, for those who are used to a script.

python scripts/train_flow_matching.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset_path clips --batch_size 1 \
    --num_epochs 10 --gradient_checkpointing --learning_rate 1e-5 --checkpoint_dir runs/train --use_ema
python scripts/train_flow_matching.py ... --pixel_loss_weight 0.1 --vae_gradient_checkpointing  # a second loss, in pixels
torchrun --nproc-per-node 2 scripts/train_flow_matching.py ...
"""

import os
import sys

from wandistiller.cli.main import start

NAMES = {"--checkpoint_dir": "--output-dir", "--checkpoint-dir": "--output-dir"}
"""Flags that are called otherwise in ``wandistiller train``."""
IDLE = "--vae-gradient-checkpointing"
"""What ``wandistiller train`` refuses where no VAE is trained through, and this script goes on without."""


def translated(arguments: list[str]) -> list[str]:
    """Return the flags of ``wandistiller train`` for those of this script."""
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        found.append(NAMES.get(name, name) + equals + value)
    names = {flag.partition("=")[0].replace("_", "-") for flag in found}
    # A file may ask for the loss in pixels too.
    if IDLE in names and not names & {"--pixel-loss-weight", "--config"}:
        if os.environ.get("RANK", "0") == "0":
            print("--vae_gradient_checkpointing has nothing to do: there is no --pixel_loss_weight", file=sys.stderr)
        found = [flag for flag in found if flag.replace("_", "-") != IDLE]
    return found


if __name__ == "__main__":
    sys.exit(start(["train", *translated(sys.argv[1:])]))
