"""What every training has beside its method: a device, a plan of steps, an average, metrics, states; a beginning and an end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wandistiller.checkpoint.training_state import (
    TrainingState,
    TrainingStates,
    check_state,
    load_facts,
    load_state,
    written_at,
)
from wandistiller.config.toml_file import write_config
from wandistiller.config.training import TrainingConfig
from wandistiller.data.batches import BatchPlan, StepPlan
from wandistiller.data.buckets import Bucket
from wandistiller.data.loader import SampleReader
from wandistiller.distributed.failures import is_rank, job_start, num_restarts
from wandistiller.distributed.parallel import Parallel, choose_parallel
from wandistiller.distributed.ranks import Ranks, rank_device, read_ranks
from wandistiller.errors import UsageError
from wandistiller.files import check_can_write, only_writer
from wandistiller.memory.estimates import Phase
from wandistiller.memory.forecast import forecast
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.monitor import Monitor
from wandistiller.models.devices import find_device
from wandistiller.terminal import say
from wandistiller.train.callbacks import Callback, KeepAverage
from wandistiller.train.ema import MovingAverage
from wandistiller.train.graphs import check_can_graph
from wandistiller.train.host_optimisation import HostOptimisation
from wandistiller.train.loop import Loop, LoopOptions, Stopped
from wandistiller.train.memory_watch import WatchMemory
from wandistiller.train.method import Method, Role
from wandistiller.train.metrics import ShowProgress, WriteMetrics
from wandistiller.train.optimisation import MixedPrecision, OptimiserOptions, Optimises

_RESULTS = ("model", "lora", "vae")
"""What trainings leave in their folders, each as large as a model."""


def prepare_device(config: TrainingConfig) -> torch.device:
    """Find the device of this process and check that a run of this configuration can be; nothing is loaded."""
    for target in config.targets:
        check_can_write(target)
    ranks = read_ranks()
    if ranks.world_size == ranks.ranks_here:  # several machines have to ask each other first whether this is a restart
        restarted = job_start() if num_restarts() else None
        find_state(config.resume, TrainingStates(config.output_dir / "states", config.keep), restarted)
    if config.distributed and not is_rank():
        raise UsageError("--distributed was given, but torchrun did not start this.", fix="Start it with torchrun.")
    device = find_device(rank_device(config.device, ranks))
    if config.cuda_graphs:
        check_can_graph(device, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def prepare_parallel(config: TrainingConfig) -> Parallel:
    """Find out how ranks train together, and check that they can; nothing is loaded."""
    return choose_parallel(config.parallel, config.shard_size, read_ranks())


def choose_precision(config: TrainingConfig, device: torch.device, weights: torch.dtype = torch.float32) -> MixedPrecision:
    """Return what is computed in 16 bits; weights that have 16 bits themselves need nothing."""
    if config.precision_name != "auto":
        return config.precision_name
    return "bf16" if device.type == "cuda" and weights == torch.float32 else "no"


@dataclass(frozen=True)
class Foreseen:
    """What a training is foreseen to take."""

    phase: Callable[[Hardware], Phase]
    streamed: Sequence[Path] = ()
    """Files that are read in every step, whose disk is measured for that."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, from its plan to its last step."""

    config: TrainingConfig
    device: torch.device
    precision: MixedPrecision
    ranks: Ranks
    monitor: Monitor
    plan: StepPlan
    num_steps: int
    metrics: WriteMetrics

    @classmethod
    def over(
        cls,
        buckets: Sequence[Bucket],
        config: TrainingConfig,
        device: torch.device,
        precision: MixedPrecision,
        ranks: Ranks,
        monitor: Monitor,
    ) -> Run:
        """Plan the steps of a run over samples, of which each has a bucket."""
        batches = BatchPlan(buckets, config.batch_size, config.seed)
        plan = StepPlan(batches, ranks.world_size, config.gradient_accumulation)
        num_steps = config.num_steps or -(-config.num_epochs * batches.batches_per_epoch // plan.batches_per_step)
        return cls(
            config=config,
            device=device,
            precision=precision,
            ranks=ranks,
            monitor=monitor,
            plan=plan,
            num_steps=num_steps,
            metrics=WriteMetrics(config.output_dir, monitor.observe),
        )

    @property
    def samples_per_step(self) -> int:
        """Samples that a full step takes, over all ranks."""
        return self.config.batch_size * self.plan.batches_per_step

    @property
    def num_epochs(self) -> float:
        """Passes over the data."""
        return self.num_steps * self.plan.batches_per_step / self.plan.plan.batches_per_epoch

    def make_average(self, role: Role) -> MovingAverage | None:
        """Return the moving average of a role, where one is asked for."""
        return MovingAverage(role.model, role.trained_parameters, self.config.ema_decay) if self.config.use_ema else None

    def optimiser_options(self, **changes: Any) -> OptimiserOptions:
        """Return the options that the configuration has for an optimiser, with some changed."""
        config = self.config
        options: dict[str, Any] = {
            "rate": config.learning_rate,
            "weight_decay": config.weight_decay,
            "clip_norm": config.clip_norm or None,
            "schedule": config.lr_schedule,
            "warmup_steps": config.warmup_steps,
            "num_steps": self.num_steps,
            "seed": config.seed,
        }
        return OptimiserOptions(**{**options, **changes})

    def train(
        self,
        method: Method,
        optimisations: Mapping[str, Optimises],
        samples: SampleReader,
        *,
        average: MovingAverage | None,
        callbacks: Sequence[Callback] = (),
        about: Sequence[str] = (),
        foreseen: Foreseen | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Stopped:
        """Take all steps from the start or the state to resume from; ``about`` is said on rank 0 before the first.

        ``foreseen`` is what the training will take, which is told before the first step, and against what it took at the end.
        ``data`` is what the samples are of, kept in every state.
        """
        config = self.config
        first: list[Callback] = [KeepAverage(average)] if average is not None else []
        for each in optimisations.values():
            if average is not None and isinstance(each, HostOptimisation):
                each.follow(average)
        states = TrainingStates(config.output_dir / "states", config.keep)
        loop = Loop(
            method,
            optimisations,
            samples,
            self.plan,
            LoopOptions(
                num_steps=self.num_steps,
                log_every=config.log_every,
                save_every=config.save_every,
                workers=config.workers,
                seed=config.seed,
                precision=self.precision,
                data=data or {},
            ),
            device=self.device,
            ranks=self.ranks,
            states=states,
            callbacks=[
                *first,
                self.metrics,
                WatchMemory(snapshot=config.memory_snapshot),
                *callbacks,
                ShowProgress(self.monitor.line),
            ],
        )
        resume_run(config.resume, loop, states)
        if self.ranks.is_first:
            config.output_dir.mkdir(parents=True, exist_ok=True)
            write_config(config.output_dir / "run.toml", config, config.command)
            for line in about:
                say(line)
        predicted = None
        if foreseen is not None and self.ranks.is_first:
            predicted = forecast(foreseen.phase, self.device, files=foreseen.streamed)
        if predicted is not None:
            say(predicted.line())
            predicted.save(config.output_dir)
        since = loop.step
        with self.monitor.phase("training", next(iter(method.roles))):
            stopped = loop.run()
        if predicted is not None and loop.step > since:
            say(predicted.outcome(self.monitor, loop.seconds_per_step))
            predicted.save(config.output_dir, self.monitor, loop.seconds_per_step)
        if self.ranks.is_first and self.device.type != "cpu":
            say("Memory by phase: " + "; ".join(self.monitor.summary()))
        return stopped


def find_state(resume: str | None, states: TrainingStates, restarted: float | None = None) -> Path | None:
    """Return the state that ``resume`` names: None for a new run, ``auto`` for the newest, or a folder.

    ``restarted`` is when torchrun began with a job that it has started again: a state that was written since then is the job's
    own, and it goes on from that. Raises where there is no state of that name, or where a new run would go on in the folder of
    an old one.
    """
    newest = states.newest()
    if newest is None:
        _refuse_to_replace(states.folder.parent)
    if newest is not None and restarted is not None and written_at(newest) >= restarted:
        return newest
    if resume is None:
        if newest is not None:
            raise UsageError(
                f"{states.folder.parent} holds a training already, up to {newest.name}.",
                fix="Go on with it with --resume auto, or give another --output-dir.",
            )
        return None
    if resume == "auto":
        return newest
    path = Path(resume)
    check_state(path)
    if newest is not None and path.resolve() != newest.resolve():
        is_older = path.resolve().parent == newest.resolve().parent
        raise UsageError(
            f"{newest} is newer than {path}." if is_older else f"{states.folder.parent} holds another training, {newest.name}.",
            why=f"going on from {path} there would leave two histories in one folder.",
            fix="Give another --output-dir, or move the states that are there away; --resume auto goes on from those.",
        )
    return path


def _refuse_to_replace(folder: Path) -> None:
    """Raise ``UsageError`` for a folder with a result whose states are gone: a new run would put its own in its place."""
    found = next((folder / name for name in _RESULTS if (folder / name).exists()), None)
    if found is not None:
        raise UsageError(
            f"{found} stands there already.",
            why="the result of this training would replace it, and there is no state to go on from.",
            fix="Give another --output-dir, or move it away.",
        )


def own_folder(config: TrainingConfig, ranks: Ranks) -> AbstractContextManager[None]:
    """Keep other trainings out of the folder that the first rank writes to; remove results that a kill has left unfinished."""
    return only_writer(config.output_dir, _RESULTS) if ranks.is_first else nullcontext()


def saved_facts(config: TrainingConfig, ranks: Ranks) -> TrainingState | None:
    """Return the state that a run will go on from, without its tensors; None for one that starts."""
    states = TrainingStates(config.output_dir / "states", config.keep)
    path = _agree_on_state(config.resume, states, ranks)
    return load_facts(path) if path is not None else None


def _agree_on_state(resume: str | None, states: TrainingStates, ranks: Ranks) -> Path | None:
    """Return the state that the first rank finds, on all of them: a shared folder may look older from another machine."""
    is_restart = ranks.largest(num_restarts())  # machines count differently, and one may be new in the job
    restarted = float(-ranks.largest(-int(job_start()))) if is_restart else None
    found: Path | None = ranks.from_first(find_state(resume, states, restarted) if ranks.is_first else None)
    return found


def resume_run(resume: str | None, loop: Loop, states: TrainingStates) -> None:
    """Load the state to go on from, where there is one."""
    path = _agree_on_state(resume, states, loop.ranks)
    if path is None:
        if loop.ranks.is_first and (resume is not None or num_restarts()):
            say(f"There is no state in {states.folder} yet; starting from the beginning")
        return
    loop.load(load_state(path, loop.like))
    if loop.ranks.is_first:
        say(f"Going on from {path}, step {loop.step}")
        if loop.step >= loop.options.num_steps:
            say(f"All {loop.options.num_steps} steps have been taken before; --num-steps or --num-epochs asks for more")


def exit_code(stopped: Stopped, ranks: Ranks) -> int:
    """Return what the command ends with, as shells know it for a signal."""
    if stopped.signal is None:
        return 0
    if ranks.is_first:
        say(f"Stopped at step {stopped.step}; {stopped.state} is saved. Go on with --resume auto")
    return 128 + stopped.signal
