"""A training that is small enough to check by hand: a linear model on numbered samples."""

from __future__ import annotations

import torch
from torch import nn

from wandistiller.checkpoint.training_state import TrainingStates, load_state
from wandistiller.data.batches import BatchPlan, StepPlan
from wandistiller.distributed.ranks import Ranks
from wandistiller.train.callbacks import Callback, KeepAverage
from wandistiller.train.ema import MovingAverage
from wandistiller.train.loop import Loop, LoopOptions
from wandistiller.train.method import Losses, Role, Turn
from wandistiller.train.optimisation import Optimisation, OptimiserOptions

CPU = torch.device("cpu")


class ToyReader:
    """Samples with inputs of their own and noise that depends on the epoch."""

    def __init__(self, count: int = 10, bad: int | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = self.inputs @ torch.arange(1.0, 5.0)
        if bad is not None:
            self.targets[bad] = float("nan")

    def __len__(self) -> int:
        return len(self.inputs)

    def name(self, index: int) -> str:
        return f"sample-{index}"

    def read(self, index: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        noise = torch.randn(4, generator=generator) * 0.1
        return {"inputs": self.inputs[index] + noise, "target": self.targets[index], "index": torch.tensor(index)}


class ToyMethod:
    """Squared error of a small network; ``dropout`` draws from the global random numbers."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).to(dtype)
        self.student = Role("student", model, is_trained=True)
        self.roles = {"student": self.student}
        self.turns = (Turn("student", self.losses),)
        self.seen: list[list[int]] = []

    def finish_step(self, ranks):
        pass

    def losses(self, batch):
        self.seen.append(batch.tensors["index"].tolist())
        found = self.student(batch.tensors["inputs"].to(next(self.student.model.parameters()).dtype))
        error = (found.squeeze(-1).float() - batch.tensors["target"]).square()
        return Losses(error.mean(), {"error": error.detach().sqrt().mean()})


class Collect(Callback):
    """Remembers what was logged."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def logged(self, loop, values):
        self.values.append({"step": loop.step, **values})


def make_loop(
    folder=None,
    *,
    steps: int = 6,
    batch_size: int = 2,
    accumulation: int = 1,
    ranks: Ranks | None = None,
    reader: ToyReader | None = None,
    method: ToyMethod | None = None,
    precision: str = "no",
    save_every: int = 0,
    keep: int = 3,
    workers: int = 0,
    callbacks=(),
    ema: bool = True,
    resume: bool = False,
    log_every: int = 1,
    seed: int = 3,
    **options,
) -> Loop:
    reader, method, ranks = reader or ToyReader(), method or ToyMethod(), ranks or Ranks()
    parameters = method.student.trained_parameters
    optimiser = OptimiserOptions(**{"rate": 0.01, "num_steps": steps, **options})
    optimisation = Optimisation(parameters, optimiser, precision, CPU)
    callbacks = [*callbacks, KeepAverage(MovingAverage(method.student.model, parameters, 0.9))] if ema else list(callbacks)
    states = TrainingStates(folder, keep) if folder is not None else None
    plan = StepPlan(BatchPlan([0] * len(reader), batch_size, seed), ranks.world_size, accumulation)
    loop = Loop(
        method,
        {"student": optimisation},
        reader,
        plan,
        LoopOptions(
            num_steps=steps, save_every=save_every, workers=workers, seed=seed, precision=precision, log_every=log_every
        ),
        device=CPU,
        ranks=ranks,
        states=states,
        callbacks=callbacks,
    )
    if resume:
        newest = states.newest()
        if newest is not None:
            loop.load(load_state(newest))
    return loop


def weights_of(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in loop.method.roles["student"].model.state_dict().items()}
