"""A training step of one rank whose model is in slices (FSDP2), against the same without, in one run.

python benchmarks/one_rank.py --output benchmarks/results [--size wan2.1-1.3b] [--small]

With one rank there is nothing to send, so what is left is what cutting into slices and bringing together costs by itself.
Weights are float32 with AdamW on the card, computed in bfloat16, activations recomputed. Beside the memory that each way takes
stands what the planner says.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

import torch
from common import DEVICE, Measurement, RandomWeights, fill, measure, release, save

from wandistiller.data.loader import Batch
from wandistiller.distributed.parallel import Parallel
from wandistiller.distributed.ranks import Ranks, joined
from wandistiller.distributed.sharding import Sharding
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.hardware import described
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Training
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.train.method import Role
from wandistiller.train.methods.finetune import FlowMatching
from wandistiller.train.optimisation import MixedPrecision, Optimisation, OptimiserOptions, autocast, travels_in
from wandistiller.units import Bytes

WAYS = ("plain", "in slices")
LATENTS = {"wan2.1-1.3b": (9, 60, 104), "tiny": (1, 8, 8)}
MOST_RATIO = 1.03


def measure_way(size: str, way: str, ranks: Ranks, runs: int) -> Measurement:
    precision: MixedPrecision = "bf16" if DEVICE.type == "cuda" else "no"
    config = SIZES[size].transformer
    release()
    with ExitStack() as ends:
        model = build_empty(TRANSFORMER, config, dtype=torch.float32)
        model = fill(model, RandomWeights(model), DEVICE).requires_grad_(True).train()
        blocks = list(model.blocks)
        ends.callback(apply_policy(blocks, "full", DEVICE).detach)
        role = Role("student", model, is_trained=True)
        if way == "in slices":
            mesh = Parallel("fsdp", 1).mesh(ranks, DEVICE)
            role.sharding = Sharding(model, blocks, mesh, travels_in(precision))
        optimisation = Optimisation(role.trained_parameters, OptimiserOptions(rate=1e-5), precision, DEVICE)
        method = FlowMatching(role, dtype=torch.float32)
        shape = (1, config["in_channels"], *LATENTS[size])
        tensors = {name: torch.randn(shape, device=DEVICE) for name in ("latents", "noise")}
        text = torch.randn(1, 512, config["text_dim"], device=DEVICE)
        batch = Batch({**tensors, "text": text, "sigma": torch.full((1,), 0.5, device=DEVICE)}, ("",), 0, 0)

        def step() -> None:
            """The same calls as the loop's."""
            sharding = role.sharding
            if sharding is not None:
                sharding.begin_losses()
            with autocast(precision, DEVICE, caches=sharding is None):
                loss = method.losses(batch).total
            if sharding is not None:
                sharding.begin_backward(is_last=True, uses_all=role.uses_all)
            optimisation.backward(loss)
            if sharding is not None:
                sharding.end_backward(is_last=True)
            optimisation.step(0)

        row = measure(f"{size}, {'x'.join(map(str, LATENTS[size]))} latents, a step", way, step, warmup=3, runs=runs)
    row.note = f"planned {planned(size, way, precision)}"
    return row


def planned(size: str, way: str, precision: MixedPrecision) -> Bytes:
    """Return what the planner says that a step reserves."""
    config = SIZES[size].transformer
    student = Use(
        name="student",
        config=config,
        latent_shape=(config["in_channels"], *LATENTS[size]),
        dtype=torch.float32,
        trains="everything",
        precision=precision,
        policy="full",
    )
    training = Training(student=student, parallel="fsdp" if way == "in slices" else "ddp")
    return training.phase(described(card="h200", host_memory=Bytes(2**37))).reserved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--size", choices=list(LATENTS), default="wan2.1-1.3b")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="a tiny model, for any machine; nothing is kept")
    arguments = parser.parse_args()
    size = "tiny" if arguments.small else arguments.size
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    os.environ |= alone
    with joined(DEVICE, needs_group=True) as ranks:
        rows = [measure_way(size, way, ranks, arguments.runs) for way in WAYS]
    plain, sliced = rows
    for row in rows:
        print(f"{row.way}: {row.reserved_gib:.2f} GiB, {row.note}")
    if plain.seconds and sliced.seconds:
        print(f"in slices / plain: {sliced.seconds / plain.seconds:.3f} (at most {MOST_RATIO} is wanted)")
    if not arguments.small:
        save("one-rank", rows, arguments.output)


if __name__ == "__main__":
    main()
