"""Optimisers with 8-bit state against fused AdamW, in one run: memory, time of an update, and what is learnt.

python benchmarks/low_bit.py --output benchmarks/results [--size wan2.1-1.3b]

An update of all weights of a named size, which are float32 with float32 gradients; then a tiny Wan of random weights learns to
undo noise on a few latents for some hundred steps, from the same start with the same numbers, once with each optimiser.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from common import DEVICE, Measurement, RandomWeights, empty_model, fill, measure, release, save
from torch import nn

from wandistiller.models.sizes import SIZES

RATE = 1e-3
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def of_bitsandbytes(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit

    return AdamW8bit(parameters, lr=RATE)


def of_torchao(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=RATE)


WAYS: dict[str, Make] = {"torch, fused": fused, "bitsandbytes, 8-bit": of_bitsandbytes, "torchao, 8-bit": of_torchao}


def update(size: str, way: str, runs: int) -> Measurement:
    """Measure one update of all weights."""
    parameters = [nn.Parameter(torch.randn(each.shape, device=DEVICE)) for each in empty_model(size).parameters()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    held = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    optimiser = WAYS[way](parameters)
    row = measure(f"{size}, an update", way, optimiser.step, warmup=2, runs=runs)
    states = (torch.cuda.memory_allocated() - held if DEVICE.type == "cuda" else 0) / sum(each.numel() for each in parameters)
    row.note = f"{states:.2f} bytes of state a weight"
    print(" ", row.note)
    return row


def learn(size: str, way: str, steps: int) -> Measurement:
    """Measure the loss after some steps, averaged over the last tenth of them."""
    model = empty_model(size)
    model = fill(model, RandomWeights(model), DEVICE).float().requires_grad_(True)
    random = torch.Generator().manual_seed(0)
    config = SIZES[size].transformer
    data = torch.randn(16, config["in_channels"], 1, 8, 8, generator=random).to(DEVICE)
    text = torch.randn(16, 8, config["text_dim"], generator=random).to(DEVICE)
    optimiser = WAYS[way](model.parameters())
    losses: list[float] = []

    def step() -> None:
        noise = torch.randn(data.shape, generator=random).to(DEVICE)
        sigma = torch.rand(16, generator=random).to(DEVICE)
        mixed = torch.lerp(data, noise, sigma.view(-1, 1, 1, 1, 1))
        velocity = model(mixed, 1000 * sigma, text, return_dict=False)[0]
        loss = (velocity - (noise - data)).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())

    row = measure(f"{size}, {steps} steps", way, step, warmup=2, runs=steps - 2)
    last = losses[-max(steps // 10, 1) :]
    row.note = f"loss {sum(last) / len(last):.5f} in the end, {losses[0]:.5f} at the start"
    print(" ", row.note)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--size", default="wan2.1-1.3b")
    parser.add_argument("--learner", default="tiny-world")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    arguments = parser.parse_args()
    rows: list[Measurement] = []
    for way in arguments.ways:
        for measured in (
            partial(update, arguments.size, way, arguments.runs),
            partial(learn, arguments.learner, way, arguments.steps),
        ):
            release()
            rows.append(measured())
            save("low-bit", rows, arguments.output)


if __name__ == "__main__":
    main()
