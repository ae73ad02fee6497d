"""Forward and backward under every activation policy, ours against the public ways, in one run.

python benchmarks/activations.py --output benchmarks/results [--size wan2.2-5b]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import DEVICE, Measurement, RandomWeights, empty_model, fill, inputs_for, measure, release, save
from streaming import SHAPES, compiled
from torch import nn

from wandistiller.memory.activations import allow_recompiling, apply_policy

Prepare = Callable[[nn.Module], None]


def policy(name: str, *, to_host: bool = False, compile_blocks: bool = False) -> Prepare:
    def prepare(model: nn.Module) -> None:
        if compile_blocks:
            compiled(model)
        apply_policy(list(model.blocks), name, DEVICE, to_host=to_host)

    return prepare


def public_checkpointing(compile_blocks: bool) -> Prepare:
    def prepare(model: nn.Module) -> None:
        if compile_blocks:
            compiled(model)
        model.enable_gradient_checkpointing()

    return prepare


WAYS: dict[str, Prepare] = {
    "nothing recomputed, eager": policy("none"),
    "nothing recomputed, compiled": lambda model: compiled(model) and None,
    "diffusers checkpointing, eager": public_checkpointing(False),
    "diffusers checkpointing, compiled": public_checkpointing(True),
    "none, to host, compiled": policy("none", to_host=True, compile_blocks=True),
    "full": policy("full"),
    "full, compiled": policy("full", compile_blocks=True),
    "full, to host, compiled": policy("full", to_host=True, compile_blocks=True),
    "selective": policy("selective"),
    "selective, to host": policy("selective", to_host=True),
    "selective, compiled": policy("selective", compile_blocks=True),
    "selective, to host, compiled": policy("selective", to_host=True, compile_blocks=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--size", default="wan2.2-5b")
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    arguments = parser.parse_args()
    allow_recompiling()
    weights = RandomWeights(empty_model(arguments.size))
    shape, (frames, height, width, batch) = next(iter(SHAPES[arguments.size].items()))
    rows: list[Measurement] = []
    for name in arguments.ways:
        release()
        model = fill(empty_model(arguments.size), weights, DEVICE).requires_grad_(True)
        WAYS[name](model)
        inputs = inputs_for(arguments.size, frames, height, width, batch)

        def step(model: nn.Module = model, inputs: tuple[torch.Tensor, ...] = inputs) -> None:
            model(*inputs, return_dict=False)[0].float().square().mean().backward()
            model.zero_grad(set_to_none=True)

        release()
        rows.append(measure(f"{arguments.size} {shape}", name, step, warmup=1, runs=3))
        del model, step
        torch._dynamo.reset()
        save("activations", rows, arguments.output)


if __name__ == "__main__":
    main()
