"""The planner: estimates a job as it was asked for and in other ways, and ranks those that fit by their time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from wandistiller.config.command import CommandConfig, command_line, launch_words
from wandistiller.config.plan import PlanConfig, PlanRequest, parse_rate
from wandistiller.errors import UsageError
from wandistiller.memory.estimates import Estimate
from wandistiller.memory.hardware import Hardware, described
from wandistiller.models.shapes import Shapes, find_shapes
from wandistiller.plan.candidates import Changes, candidates, smaller_batches
from wandistiller.sample.prediction import predict_sample
from wandistiller.train.prediction import predict_distill, predict_train
from wandistiller.train.vae_prediction import predict_train_vae
from wandistiller.units import Bytes

Predict = Callable[[Any, Shapes, Hardware], Estimate]
PREDICTIONS: dict[str, Predict] = {
    "distill": predict_distill,
    "train": predict_train,
    "train-vae": predict_train_vae,
    "sample": predict_sample,
}


@dataclass(frozen=True)
class Option:
    """One way to do a job."""

    changes: Changes
    estimate: Estimate
    lacks: tuple[str, ...]
    """Why it does not fit; nothing if it does."""

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def seconds(self) -> float:
        return self.estimate.step_seconds


@dataclass(frozen=True)
class Plan:
    """What came out: the job as asked for, the ways that fit from the fastest, and those that do not."""

    request: PlanRequest
    hardware: Hardware
    asked: Option
    fitting: tuple[Option, ...]
    losers: tuple[Option, ...] = field(default=())

    @property
    def best(self) -> Option | None:
        return self.fitting[0] if self.fitting else None

    @property
    def best_job(self) -> CommandConfig | None:
        """The configuration of the best way."""
        return None if self.best is None else replace(self.request.job, **self.best.changes)

    @property
    def command(self) -> str | None:
        """What to type for the best way."""
        if self.best is None:
            return None
        line = command_line(self.request.command, self.request.job, self.best.changes)
        if self.hardware.num_ranks == 1 or self.request.command == "sample":
            return line
        return " ".join([*launch_words(self.hardware.num_nodes, self.hardware.num_cards), line])


def make_plan(request: PlanRequest) -> Plan:
    """Estimate the job in all ways and rank them."""
    hardware = find_hardware(request.options)
    shapes = find_shapes(model_of(request.job))
    predict = PREDICTIONS[request.command]

    def option(changes: Changes) -> Option:
        estimate = predict(replace(request.job, **changes), shapes, hardware)
        return Option(changes, estimate, tuple(estimate.lacks(hardware)))

    found: list[Option] = []
    ways = candidates(request.job, request.given, hardware.num_ranks)
    num_fitting = 0
    for _, group in itertools.groupby(ways, key=lambda changes: policy_of(replace(request.job, **changes))):
        before = len(found)
        for changes in group:
            # What only adds to a way that fits already cannot be better than it.
            if not any(each.fits and each.changes and each.changes.items() <= changes.items() for each in found):
                found.append(option(changes))
        # Each policy is slower than those before it: when two of them have fitted, the rest cannot be better.
        num_fitting += any(each.fits for each in found[before:])
        if num_fitting == 2:
            break
    if not any(each.fits for each in found):
        for smaller in smaller_batches(request.job, request.given):
            found += [option({**each.changes, **smaller}) for each in list(found) if "batch_size" not in each.changes]
            if any(each.fits for each in found):
                break
    asked = found[0]
    fitting = sorted((each for each in found if each.fits), key=lambda each: (each.seconds, each.estimate.device))
    losers = [each for each in found if not each.fits and each is not asked]
    return Plan(request, hardware, asked, tuple(fitting), tuple(losers))


def policy_of(job: Any) -> Any:
    """Return what decides what a job keeps for backward, where there is one."""
    return (getattr(job, "policy", None), getattr(job, "activations_to_host", None))


def find_hardware(options: PlanConfig) -> Hardware:
    """Return the machine to plan for."""
    return described(
        card=options.card,
        gpu=None if options.gpu is None else Bytes.parse(options.gpu),
        num_cards=options.gpus,
        num_nodes=options.nodes,
        host_memory=None if options.ram is None else Bytes.parse(options.ram),
        bus_rate=None if options.bus is None else parse_rate(options.bus),
        disk_rate=None if options.disk is None else parse_rate(options.disk),
        network_rate=None if options.network is None else parse_rate(options.network),
    )


def model_of(job: Any) -> str:
    """Return the model that a job is about."""
    source = getattr(job, "teacher_path", None) or getattr(job, "model", None)
    if source is None:
        raise UsageError("There is nothing to plan without a model.", fix="Name one, such as --model wan2.2-5b.")
    return str(source)
