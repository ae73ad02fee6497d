"""Sample from single files: the flags of ``wandistiller sample``, for those who are used to a script.

python scripts/test_inference.py --checkpoint model.safetensors --cond cond.safetensors --uncond uncond.safetensors \
    --vae-checkpoint vae.safetensors --output sample.png
"""

import sys

from wandistiller.cli.main import start

sys.exit(start(["sample", *sys.argv[1:]]))
