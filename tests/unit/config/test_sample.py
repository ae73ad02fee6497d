from pathlib import Path

import pytest

from wandistiller.config.sample import SampleConfig
from wandistiller.errors import UsageError

GOOD = {"model": "tiny", "prompt": ("x",)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing to sample from"),
        ({"model": "tiny"}, "nothing to draw"),
        ({**GOOD, "cond": Path("c")}, "--prompt and --cond were both given"),
        ({"checkpoint": Path("m"), "prompt": ("x",)}, "needs a text encoder"),
        ({**GOOD, "steps": 0}, "--steps 0 is too small"),
        ({**GOOD, "batch_size": -1}, "--batch-size -1"),
        ({**GOOD, "frames": 0}, "--frames 0"),
        ({**GOOD, "sigma_shift": 0.0}, "not between 0 and 1000"),
        ({**GOOD, "sigma_shift": float("nan")}, "not a finite number"),
        ({**GOOD, "cfg_scale": float("inf")}, "not a finite number"),
        ({**GOOD, "uncond": Path("u")}, "--uncond goes with --cond"),
        ({"model": "", "prompt": ("x",)}, "nothing to sample from"),
        ({**GOOD, "boundary": 1.5}, "not between 0 and 1"),
        ({**GOOD, "seed": -1}, "out of range"),
        ({**GOOD, "placement": "gpu", "resident": "3"}, "--resident goes with --placement offload"),
        ({**GOOD, "placement": "disk", "eight_bit": True}, "--eight-bit goes with --placement offload"),
        ({**GOOD, "placement": "offload", "max_memory": ("0=4GiB",)}, "--max-memory goes with"),
        ({**GOOD, "output": Path("x.jpg")}, "unknown ending"),
        ({**GOOD, "frames": 5, "output": Path("x.png")}, "5 frames do not go into"),
        ({**GOOD, "output_latent": Path("x.pt")}, "must end with .safetensors"),
        ({**GOOD, "output": Path("x.safetensors"), "output_latent": Path("auto")}, "as --output and as --output-latent"),
    ],
)
def test_what_does_not_go_together(fields, message):
    with pytest.raises(UsageError, match=message):
        SampleConfig(**fields).check()


def test_the_bare_latent_flag_puts_latents_beside_the_output():
    config = SampleConfig(**GOOD, output=Path("runs/x.mp4"), output_latent=Path("auto"))
    config.check()
    assert config.latent_path == Path("runs/x.safetensors")
