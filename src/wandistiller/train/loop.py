"""The loop: steps, accumulates, clips, saves, resumes. It knows no method, and all that is optional is a callback.

One optimiser step is one global step, whatever the accumulation or the number of turns. Losses stay on the device and are read
once a logging interval and before anything is saved; one that is not finite stops the run then, with the role and the batch
that gave it.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from wandistiller import doing
from wandistiller.checkpoint.training_state import TrainingState, TrainingStates
from wandistiller.data.batches import StepPlan
from wandistiller.data.loader import Batch, SampleReader, load_steps
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import TrainingError, UsageError, shortened
from wandistiller.memory.rates import synchronise
from wandistiller.memory.stored_state import changing_state
from wandistiller.terminal import say
from wandistiller.train.callbacks import Callback, KeepAverage
from wandistiller.train.data_place import DataPlaces
from wandistiller.train.interrupts import Interrupted, Interrupts
from wandistiller.train.method import Losses, Method, Role, Turn
from wandistiller.train.numbers import Number, Numbers, Sums
from wandistiller.train.optimisation import OTHER_WEIGHTS, MixedPrecision, Optimises, autocast, refuse_other_flags
from wandistiller.train.random_states import random_states, set_random_states
from wandistiller.train.saves import Saves
from wandistiller.train.step_clock import StepClock

# DDP's, of a dimension of one, which has no stride that matters.
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """When to do what."""

    num_steps: int
    log_every: int = 10
    save_every: int = 0
    """Steps between states; 0 saves at the end alone."""
    workers: int = 0
    seed: int = 0
    precision: MixedPrecision = "no"
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the samples are of, kept in every state for whoever goes on."""


@dataclass(frozen=True)
class Stopped:
    """How a run ended."""

    step: int
    signal: int | None
    """The signal that ended it early."""
    state: str | None
    """Where its state is."""


def _refuse_other_weights(role: Role, values: Mapping[str, Tensor]) -> None:
    """Raise ``UsageError`` where what was saved of a role has other names or shapes than the role has now."""
    names = role.saved_names
    model = changing_state(role.model) if names else {}
    wanted = {name: model[name].shape for name in names}
    found = {name: value.shape for name, value in values.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        what = f"{shortened(wrong)} of role '{role.name}' do not match" if found else f"it has no role '{role.name}'"
        raise UsageError(
            f"The state is of another training: {what}.",
            fix="Resume with the model and the flags that it was started with, or begin a new run from its result.",
        )


class Loop:
    """Takes steps until they are done or somebody interrupts."""

    def __init__(
        self,
        method: Method,
        optimisations: Mapping[str, Optimises],
        reader: SampleReader,
        plan: StepPlan,
        options: LoopOptions,
        *,
        device: torch.device,
        ranks: Ranks,
        states: TrainingStates | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """``optimisations`` has one for the role of each turn."""
        self.method = method
        self.optimisations = optimisations
        self.options = options
        self.device = device
        self.ranks = ranks
        self.step = 0
        """Steps done."""
        self.position = 0
        """Micro-batches of all ranks taken."""
        self.clock = StepClock(device)
        self.seconds_per_step = 0.0
        """Over all steps that this process took, once it has."""
        self.batches: list[Batch] = []
        """Those of the last step, for callbacks."""
        self._reader = reader
        self._plan = plan
        self._places = DataPlaces(plan.plan, reader)
        self._saves = Saves(states, ranks) if states is not None else None
        self._callbacks = list(callbacks)
        self._numbers = Numbers(device, ranks)
        self._interrupts = Interrupts()
        self._saved_step = -1
        self._steps: Generator[list[Batch]] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position / self.batches_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of all ranks in a pass over the data."""
        return self._plan.plan.batches_per_epoch

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of all ranks in a step, which may belong to two passes."""
        return self._plan.batches_per_step

    def run(self) -> Stopped:
        """Go on to the last step; a first Ctrl-C or SIGTERM ends the run after the current one, with its state saved."""
        with self._interrupts.noted(), self._training_together(), self._saves or nullcontext(), self._reading():
            self._tell("started")
            self.clock = StepClock(self.device)
            first, since, seconds = self.step, self.step, 0.0
            while self.step < self.options.num_steps and self._interrupted_by() is None:
                self._tell("stepping")
                doing.note(f"in step {self.step + 1}, waiting for data")
                self._take_step([batch.to(self.device) for batch in self._next_batches()])
                if self.step % self.options.log_every == 0 or self.step == self.options.num_steps:
                    values = self._read_metrics()
                    now = self.clock.seconds
                    values["seconds_per_step"] = (now - seconds) / (self.step - since)
                    since, seconds = self.step, now
                    self._tell("logged", values)
                self._tell("stepped")
                if self.options.save_every and self.step % self.options.save_every == 0:
                    with self.clock.pause():
                        self._save(goes_on=self.step < self.options.num_steps)
                # Only now: it may take long, and whoever ends the run meanwhile finds the state.
                self._tell("looking")
            self._check_losses()
            self.seconds_per_step = self.clock.seconds / max(self.step - first, 1)
            if self._saved_step != self.step:
                self._save(goes_on=False)
            saved = self._finish_saving()
            self.read_anew()
            self._tell("ended")
            # Asked once more: it may have come to one rank in the last step, and all have to end alike.
            interrupted = self._interrupted_by()
        return Stopped(self.step, interrupted, saved)

    def _note_doing(self, what: str) -> None:
        """Say what begins in this step; on a card the host may come to wait for other ranks in any of it."""
        doing.note(f"in step {self.step + 1}, {what}", waits_for_ranks=True)

    def read_anew(self) -> None:
        """Forget what was read ahead: samples are others from here on."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Send the workers home also after an error: Python waits for them at its end, and no signal stops them."""
        try:
            yield
        finally:
            self.read_anew()

    def _next_batches(self) -> list[Batch]:
        if self._steps is None:
            self._steps = load_steps(
                self._reader,
                self._plan,
                start=self.position,
                rank=self.ranks.rank,
                seed=self.options.seed,
                workers=self.options.workers,
            )
        return next(self._steps)

    def _interrupted_by(self) -> int | None:
        """Return the signal that has reached some rank, the same on all of them."""
        return self.ranks.largest(self._interrupts.signal or 0) or None

    def heed_signals(self) -> None:
        """Raise ``Interrupted`` if a signal has reached some rank; all ranks ask together, and so leave at the same place.

        Else one of them would wait for the others' part in what they compute or count together.
        """
        synchronise(self.device)  # the host is ahead of the device, and would have asked for the last time long before its end
        if self._interrupted_by() is not None:
            raise Interrupted

    def _save(self, *, goes_on: bool) -> None:
        """Write the state, all ranks together, and beside the next steps where there are some."""
        self._check_losses()
        self._saved_step = self.step
        if self._saves is not None:
            doing.note(f"after step {self.step}, saving")
            self._finish_saving()
            everyone = self.ranks.gather((random_states(self.device), self._numbers.sums()))
            self._saves.save(self._state([each[0] for each in everyone], [each[1] for each in everyone]), beside=goes_on)

    def _finish_saving(self) -> str | None:
        """Return where the last state is, once it is complete."""
        path = self._saves.finish() if self._saves is not None else None
        if path is not None and self.ranks.is_first:
            self._tell("saved", path)
        return path

    def load(self, state: TrainingState) -> None:
        """Go on from a state."""
        self.step, self.position = state.step, state.facts["position"]
        self._saved_step = self.step
        if "place" in state.facts:  # states of earlier versions have the position alone
            found = self._places.find(state.facts["place"], self.position)
            self.position = found.position
            self._say(found.note)
        flags = state.facts.get("roles", {})
        for name, role in self.method.roles.items():
            refuse_other_flags(flags.get(name, {}), role.flags, OTHER_WEIGHTS)
            values = state.part(f"roles/{name}")
            _refuse_other_weights(role, values)
            # Through the model, which knows where its weights are.
            role.model.load_state_dict(values, strict=False)
        for name in sorted({key.split("/")[1] for key in state.tensors if key.startswith("roles/")} - self.method.roles.keys()):
            self._say(f"The state has a role '{name}', which this run goes on without")
        for name, optimisation in self.optimisations.items():
            optimisation.load_state(state.part(f"optimisers/{name}"), state.facts["optimisers"][name])
        for callback in self._callbacks:
            callback.load(state.part(f"callbacks/{type(callback).__name__}"))
        if state.part(f"callbacks/{KeepAverage.__name__}") and not any(
            isinstance(each, KeepAverage) for each in self._callbacks
        ):
            self._say("The state has a moving average, which this run goes on without, as --use-ema was not given")
        self._numbers.load(state.facts.get("sums", ()))
        generators = state.facts["generators"]
        # The random numbers last, because loading may draw some. With another number of ranks each takes one that is there.
        set_random_states(generators[self.ranks.rank % len(generators)], self.device)

    def like(self, name: str) -> Tensor | None:
        """Return the weight that a tensor of a state belongs to, where it is cut into pieces: it is read in the same ones."""
        kind, owner, key = name.split("/", 2)
        if kind == "optimisers" and owner in self.optimisations:
            return self.optimisations[owner].like(key)
        if kind == "roles" and owner in self.method.roles:
            return self.method.roles[owner].pieces.get(key)
        found = (each.state().get(key) for each in self._callbacks if type(each).__name__ == owner)
        return next(found, None)

    def _state(self, generators: list[Any], sums: list[Sums]) -> TrainingState:
        tensors: dict[str, Tensor] = {}
        place = self._places.describe(self.position)
        facts: dict[str, Any] = {"position": self.position, "place": place, "generators": generators, "optimisers": {}}
        facts["data"] = dict(self.options.data)
        facts["sums"] = sums
        # Optimisers first: one that works on the host may still be updating weights.
        for name, optimisation in self.optimisations.items():
            own, facts["optimisers"][name] = optimisation.state()
            tensors |= {f"optimisers/{name}/{key}": tensor for key, tensor in own.items()}
        facts["roles"] = {name: {"flags": role.flags} for name, role in self.method.roles.items() if role.is_trained}
        for name, role in self.method.roles.items():
            values = changing_state(role.model)
            tensors |= {f"roles/{name}/{key}": values[key] for key in role.saved_names}
        for callback in self._callbacks:
            tensors |= {f"callbacks/{type(callback).__name__}/{key}": tensor for key, tensor in callback.state().items()}
        return TrainingState(self.step, tensors, facts)

    def _take_step(self, batches: list[Batch]) -> None:
        self.batches = batches
        total = self._plan.num_samples(self.position)
        shardings = [role.sharding for role in self.method.roles.values() if role.sharding is not None]
        for turn in self.method.turns:
            optimisation, acting = self.optimisations[turn.role], self.method.roles[turn.role]
            for number, batch in enumerate(batches):
                batch.step = self.step
                is_last = number == len(batches) - 1
                for sharding in shardings:
                    sharding.begin_losses()
                with self._synchronising(turn, is_last=is_last):
                    # Weights in 16 bits must not outlive the block that they were brought together for.
                    self._note_doing(f"computing the losses of role '{turn.role}'")
                    with autocast(self.options.precision, self.device, caches=not shardings):
                        losses = turn.losses(batch)
                    self._note(turn, batch, losses)
                    # Each sample counts the same, also in a batch that is not full. Exchanges divide by the number of ranks.
                    share = batch.num_samples / total * self.ranks.world_size
                    if acting.sharding is not None:
                        acting.sharding.begin_backward(is_last=is_last, uses_all=acting.uses_all)
                    self._note_doing(f"computing and exchanging gradients of role '{turn.role}'")
                    optimisation.backward(losses.total * share, is_last=is_last)
                    if acting.sharding is not None:
                        acting.sharding.end_backward(is_last=is_last)
            self._note_doing(f"changing the weights of role '{turn.role}'")
            norm = optimisation.step(self.step).to(self.device)
            if turn.finish is not None:
                turn.finish()
            self._numbers.add(f"{turn.role}/gradient_norm", norm, 1)
            if self.options.precision != "fp16":  # in which a step whose gradients ran over is left out
                names = tuple(name for batch in batches for name in batch.names)
                self._numbers.watch(Number("norm of all gradients", turn.role, self.step, names, norm))
        self.method.finish_step(self.ranks)
        self.step += 1
        self.position += self.batches_per_step

    @contextmanager
    def _training_together(self) -> Iterator[None]:
        """Let ranks exchange the gradients of what they train, for as long as the loop runs.

        Whoever holds on to this also keeps the threads of the process group, and a process that ends with them may crash.
        """
        trained = [role for role in self.method.roles.values() if role.is_trained and role.trained_parameters]
        shared = [role for role in trained if role.sharding is None]
        for role in shared if self.ranks.world_size > 1 else []:
            devices = [self.device] if self.device.type == "cuda" else None
            together = DistributedDataParallel(role.model, device_ids=devices, find_unused_parameters=not role.uses_all)
            # Buffers are computed alike from the same weights, so they need no exchange.
            together.broadcast_buffers = False
            role.call = together
            del together
        try:
            yield
        finally:
            for role in shared if self.ranks.world_size > 1 else []:
                role.call = None

    def _synchronising(self, turn: Turn, *, is_last: bool) -> AbstractContextManager[Any]:
        """Ranks exchange gradients with the last micro-batch of a step."""
        call = self.method.roles[turn.role].call
        return call.no_sync() if isinstance(call, DistributedDataParallel) and not is_last else nullcontext()

    def _note(self, turn: Turn, batch: Batch, losses: Losses) -> None:
        for name, role in losses.culprits.items():
            self._numbers.watch(Number(f"metric '{name}'", role, self.step, batch.names, losses.metrics[name].detach()))
        self._numbers.watch(Number("loss", turn.role, self.step, batch.names, losses.total.detach()))
        name = "loss" if len(self.method.turns) == 1 else f"{turn.role}/loss"
        self._numbers.add(name, losses.total.detach(), batch.num_samples)
        for name, value in losses.metrics.items():
            self._numbers.add(name, value.detach(), batch.num_samples)

    def _read_metrics(self) -> dict[str, float]:
        """Return what the steps since the last time have come to."""
        self._check_losses()
        values = self._numbers.means()
        for name, optimisation in self.optimisations.items():
            self._check_scale(name, optimisation)
            values["rate" if len(self.optimisations) == 1 else f"{name}/rate"] = optimisation.rate
        return {**values, "epoch": self.epoch}

    def _check_losses(self) -> None:
        """Raise if a number since the last look is not finite, on every rank; the first has the blame."""
        blamed = self._numbers.not_finite()
        if blamed:
            self._finish_saving()  # a state from before is worth having, and all ranks are here
            number, names = blamed[0], [name for each in blamed for name in each.names]
            raise TrainingError(
                f"The {number.what} of role '{number.role}' is {float(number.value)} at step {number.step + 1}, "
                f"on {shortened(names)}.",
                why=self.method.roles[number.role].advice.why,
                fix=self.method.roles[number.role].advice.fix,
            )

    def _check_scale(self, role: str, optimisation: Optimises) -> None:
        """Raise where steps have been left out until the loss is scaled down instead of up: the next ones would be as well."""
        if optimisation.loss_scale < 1:
            names = [name for batch in self.batches for name in batch.names]
            raise TrainingError(
                f"The gradients of role '{role}' do not fit into float16 however the loss is scaled, up to step {self.step}, "
                f"on {shortened(names)}.",
                why="one step after the other was left out.",
                fix=self.method.roles[role].advice.fix,
            )

    def _say(self, message: str) -> None:
        if message and self.ranks.is_first:
            say(message)

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            with doing.noted(f"after step {self.step}, in {type(callback).__name__}"):
                getattr(callback, event)(self, *arguments)
