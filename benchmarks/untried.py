"""Configurations drawn at random from all that the program can do: nobody chose them, and no constant was fitted to them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.memory.encoder_phases import Decoding
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Adapters, Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.sizes import SIZES
from wandistiller.plan.trial_steps import Work
from wandistiller.train.vae_prediction import VaeStep

MODELS = ("wan2.1-1.3b", "wan2.2-5b", "wan2.1-14b")
LINEARS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
MOST_TOKENS = 40_000
"""In a batch, so that a step takes seconds."""


@dataclass
class Draw:
    """A source of choices, which keeps what was chosen as a name."""

    source: random.Random
    name: list[str]

    def one(self, options: tuple[Any, ...], *, said: bool = True) -> Any:
        found = self.source.choice(options)
        if said and not isinstance(found, bool):
            self.name.append(str(found))
        return found

    def maybe(self, word: str, chance: float = 0.4) -> bool:
        found = self.source.random() < chance
        if found:
            self.name.append(word)
        return found


def untried(seed: int, count: int) -> Iterator[tuple[str, Work]]:
    """Yield as many works, always the same ones for a seed."""
    for index in range(count):
        draw = Draw(random.Random(f"{seed} {index}"), [f"{seed}.{index}"])
        kind = draw.source.choices((sampling, training, distilling, decoding, vae_training), (4, 6, 4, 1, 2))[0]
        work = kind(draw)
        yield " ".join(draw.name), work


def _latents(draw: Draw, channels: int) -> tuple[tuple[int, int, int, int], int]:
    """Return latents of any size, and how many of them a batch has."""
    while True:
        frames = draw.source.choice((1, 1, 1, 3, 5, 7, 9, 13, 17, 21, 31))
        height, width = 2 * draw.source.randint(12, 40), 2 * draw.source.randint(12, 45)
        batch = draw.source.choice((1, 1, 2, 3, 4, 6, 8, 12))
        if 1000 < batch * frames * height * width // 4 < MOST_TOKENS:
            draw.name.append(f"{batch}x{frames}x{height}x{width}")
            return (channels, frames, height, width), batch


def _placing(draw: Draw) -> Placing:
    if draw.one(("gpu", "offload")) == "gpu":
        return Placing()
    return Placing(name="offload", resident=draw.one((0, 0, 2, 5, 11)), eight_bit=draw.maybe("8-bit"))


def sampling(draw: Draw) -> Work:
    config = dict(SIZES[draw.one(MODELS)].transformer)
    shape, batch = _latents(draw, config["in_channels"])
    use = Use(name="student", config=config, latent_shape=shape, batch_size=batch, is_compiled=draw.maybe("compiled", 0.25))
    return Passes(use=use, placing=_placing(draw), passes=draw.one((1, 2)))


def _policy(draw: Draw) -> dict[str, Any]:
    policy = draw.one(("none", "full", "selective"))
    return {"policy": policy, "to_host": draw.maybe("to host", 0.3), "is_compiled": draw.maybe("compiled", 0.25)}


def training(draw: Draw) -> Work:
    size = draw.one(MODELS)
    config = dict(SIZES[size].transformer)
    shape, batch = _latents(draw, config["in_channels"])
    common = {"name": "student", "config": config, "latent_shape": shape, "batch_size": batch, **_policy(draw)}
    accumulation, averages = draw.one((1, 1, 1, 2, 3)), draw.maybe("averages", 0.3)
    if size == "wan2.1-14b" or draw.maybe("adapters"):
        adapters = Adapters(draw.one((4, 16, 64, 128)), LINEARS[: draw.one((2, 4, 6))])
        use = Use(trains="adapters", adapters=adapters, **common)
        return Training(student=use, placing=_placing(draw), accumulation=accumulation, averages=averages)
    if draw.maybe("bf16 weights", 0.5):
        use = Use(trains="everything", **common)
        if draw.maybe("offload", 0.4):
            return Training(student=use, placing=Placing(name="offload"), accumulation=accumulation, averages=averages)
        name, rounding = draw.one(("adamw", "adafactor")), draw.one(("masters", "stochastic"))
        optimiser = OptimiserChoice(name, rounding if name == "adamw" else "masters")  # as runs have it
        return Training(student=use, optimiser=optimiser, accumulation=accumulation, averages=averages)
    use = Use(trains="everything", dtype=torch.float32, precision=draw.one(("bf16", "fp16")), **common)
    optimiser = OptimiserChoice(draw.one(("adamw", "adafactor")))
    return Training(student=use, optimiser=optimiser, accumulation=accumulation, averages=averages)


def distilling(draw: Draw) -> Work:
    teacher_config = dict(SIZES[draw.one(MODELS)].transformer)
    heads, layers = draw.one((6, 8, 10, 12)), draw.one((8, 12, 18, 24))
    config = {
        **teacher_config,
        "num_attention_heads": heads,
        "num_layers": layers,
        "ffn_dim": 128 * heads * draw.one((3, 4, 5)),
    }
    shape, batch = _latents(draw, config["in_channels"])
    common = {"latent_shape": shape, "batch_size": batch}
    weights = {"trains": "everything", "dtype": torch.float32, "precision": draw.one(("bf16", "fp16"))}
    student = Use(name="student", config=config, **common, **weights, **_policy(draw))
    placing = _placing(draw)
    return Training(
        student=student,
        teacher=Use(name="teacher", config=teacher_config, **common),
        teacher_placing=placing,
        teacher_passes=draw.one((1, 1, 2)),
        matches_features=draw.maybe("features", 0.3),
        averages=draw.maybe("averages", 0.3),
    )


def decoding(draw: Draw) -> Work:
    config = dict(SIZES[draw.one(("wan2.1-14b", "wan2.2-5b"))].vae)
    frames, height, width = draw.one((1, 3, 9, 21)), 2 * draw.source.randint(12, 40), 2 * draw.source.randint(12, 45)
    draw.name.append(f"{height}x{width}")
    dtype = torch.float32 if draw.maybe("float32") else torch.bfloat16
    shape = (config["z_dim"], frames, height, width)
    return Decoding(config=config, latent_shape=shape, dtype=dtype, is_tiled=draw.maybe("tiled"))


def vae_training(draw: Draw) -> Work:
    frames, side = draw.one((1, 5, 9, 17)), draw.one((128, 192, 256))
    options = {
        "batch_size": draw.one((1, 2, 3)),
        "gan_training": draw.maybe("critic", 0.6),
        "use_lpips": draw.maybe("LPIPS", 0.6),
        "lpips_checkpointing": draw.maybe("LPIPS checkpointed", 0.3),
        "vae_gradient_checkpointing": draw.maybe("checkpointed"),
        "use_ema": draw.maybe("averages"),
        "r1_interval": 1,
    }
    precision = draw.one(("no", "bf16", "fp16"))
    vae = dict(SIZES["wan2.1-14b"].vae)
    return VaeStep(config=TrainVaeConfig(**options), vae=vae, shape=(frames, side, side), precision=precision)
