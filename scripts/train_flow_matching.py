"""Fine-tune with flow matching: the flags of ``wandistiller train``, for those who are used to a script.

python scripts/train_flow_matching.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset_path clips --batch_size 1 \
    --num_epochs 10 --gradient_checkpointing --learning_rate 1e-5 --checkpoint_dir runs/train --use_ema
python scripts/train_flow_matching.py ... --pixel_loss_weight 0.1 --vae_gradient_checkpointing  # a second loss, in pixels
torchrun --nproc-per-node 2 scripts/train_flow_matching.py ...
"""

import sys

from wandistiller.cli.main import start

NAMES = {"--checkpoint_dir": "--output-dir", "--checkpoint-dir": "--output-dir"}
"""Flags that are called otherwise in ``wandistiller train``."""


def translated(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return NAMES.get(name, name) + equals + value


if __name__ == "__main__":
    sys.exit(start(["train", *map(translated, sys.argv[1:])]))
