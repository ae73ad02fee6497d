"""A full fine-tuning step at video length: weights, gradients and optimiser on the host, against all on the card, in one run.

python benchmarks/finetune.py --output benchmarks/results [--size wan2.2-5b]

On the card the weights, gradients and both moments are bfloat16 (fused AdamW), which is the least that the plain way needs. On
the host the moments and a master copy of the weights are float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from common import DEVICE, Measurement, RandomWeights, empty_model, fill, inputs_for, measure, release, save
from streaming import SHAPES, compiled
from torch import nn

from wandistiller.memory.activations import allow_recompiling, apply_policy
from wandistiller.memory.streaming import stream_blocks
from wandistiller.train.host_optimisation import HostOptimisation
from wandistiller.train.optimisation import OptimiserOptions

Way = tuple[nn.Module, Callable[[torch.Tensor], None], Callable[[], None]]
"""A model, what to do with a loss, and what to do in the end."""


def on_the_card(size: str, weights: RandomWeights) -> Way:
    model = compiled(fill(empty_model(size), weights, DEVICE).requires_grad_(True))
    apply_policy(list(model.blocks), "selective", DEVICE, to_host=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return model, step, lambda: None


def on_the_host(clip_norm: float | None) -> Callable[..., Way]:
    def make(size: str, weights: RandomWeights) -> Way:
        model = compiled(empty_model(size))
        apply_policy(list(model.blocks), "selective", DEVICE, to_host=True)
        stream = stream_blocks(model, list(model.blocks), DEVICE, read=weights, train=True)
        options = OptimiserOptions(rate=1e-5, clip_norm=clip_norm)
        optimisation = HostOptimisation(dict(model.named_parameters()), stream, options, "no", DEVICE)
        number = iter(range(10**9))

        def step(loss: torch.Tensor) -> None:
            optimisation.backward(loss)
            optimisation.step(next(number))

        def close() -> None:
            optimisation.wait()
            optimisation.close()
            stream.close()

        return model, step, close

    return make


WAYS = {
    "all on the card, bfloat16 moments": on_the_card,
    "wandistiller, offload, no clipping": on_the_host(None),
    "wandistiller, offload": on_the_host(1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--size", default="wan2.2-5b")
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--runs", type=int, default=4)
    arguments = parser.parse_args()
    allow_recompiling()
    weights = RandomWeights(empty_model(arguments.size))
    shape, latents = next(iter(SHAPES[arguments.size].items()))
    rows: list[Measurement] = []
    for name in arguments.ways:
        release()
        model, step, close = WAYS[name](arguments.size, weights)
        inputs = inputs_for(arguments.size, *latents)

        def run(model: nn.Module = model, step: Callable[[torch.Tensor], None] = step, inputs: tuple = inputs) -> None:
            step(model(*inputs, return_dict=False)[0].float().square().mean())

        release()
        row = measure(f"{arguments.size} {shape}, fine-tuning step", name, run, warmup=2, runs=arguments.runs)
        row.note = f"host memory of the process {psutil.Process().memory_info().rss / 2**30:.1f} GiB"
        print(row.note)
        rows.append(row)
        close()
        del model, step, run, close
        torch._dynamo.reset()
        save("finetune", rows, arguments.output)


if __name__ == "__main__":
    main()
