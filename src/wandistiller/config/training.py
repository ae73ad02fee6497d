"""What the configurations of all trainings have in common: steps, rates, precision, states, devices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from wandistiller.config.command import CommandConfig, flag_name
from wandistiller.errors import UsageError

PrecisionName = Literal["auto", "no", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(CommandConfig):
    """Base of the configuration of a training."""

    command: ClassVar[str]
    """Name of the command that this is the configuration of."""

    output_dir: Path = Path("runs/training")
    """Folder of the run: states to resume from, pictures, metrics.jsonl, TensorBoard files, and the result at the end."""

    num_steps: int | None = None
    """Optimiser steps. Default: what --num-epochs takes."""

    num_epochs: int = 1
    """Passes over the data, where --num-steps is not given."""

    batch_size: int = 1
    """Samples computed together on each device; lower it when memory runs out and raise --gradient-accumulation."""

    gradient_accumulation: int = 1
    """Batches on each device that make one step; the gradient is that of all their samples together."""

    learning_rate: float = 1e-4
    """Step size after the warm-up: 1e-4 is usual for LoRA and for small models, 1e-5 for all weights of a trained model."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine fall to 0 by the end of the last step."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises."""

    weight_decay: float = 0.01
    """Decoupled weight decay."""

    clip_norm: float = 1.0
    """Most that the norm of all gradients may be; 0 for no limit."""

    mixed_precision: PrecisionName = "auto"
    """What is computed in 16 bits while the weights stay as they are. 'auto' is bf16 on a GPU and no on the CPU."""

    use_ema: bool = False
    """Keep a moving average of the weights; pictures and the result are of the average."""

    ema_decay: float = 0.999
    """Memory of the moving average: 0.999 averages the last thousand steps."""

    cuda_graphs: bool = False
    """Record the computation of each batch shape once and replay it: a model of a few million parameters, whose time goes
    into launching kernels, trains several times faster. One CUDA device, weights on it."""

    torch_compile: bool = False
    """Compile what is computed most: slow first steps, then faster and smaller."""

    resume: str | None = None
    """Go on from a state: 'auto' for the newest complete one in --output-dir (or the start, if there is none), or a folder."""

    save_every: int = 500
    """Steps between states; 0 saves at the end alone."""

    keep: int = 2
    """Newest states that are kept."""

    log_every: int = 10
    """Steps between lines of metrics."""

    validate_every: int = 500
    """Steps between looks at the held-out data; 0 for none before the end."""

    seed: int = 0
    """Seed of everything random; the same seed gives the same run."""

    workers: int = 2
    """Processes that read ahead; 0 reads in between."""

    device: str = "auto"
    """Where to compute: cuda, cuda:1, mps or cpu. 'auto' takes the best there is, under torchrun one GPU for each process."""

    parallel: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """How the processes of torchrun train together: 'ddp' (the whole model on each card), 'fsdp' (each card keeps a slice of
    weights, gradients and optimiser state, and blocks are brought together when they compute), 'hsdp' (the same inside of a
    machine, a copy on each machine). 'auto' takes the first of ddp, hsdp and fsdp that is foreseen to fit; with train-vae it is
    ddp."""

    shard_size: int | None = None
    """With --parallel hsdp: ranks that hold one copy of the model between them. Default: those of a machine."""

    rank_timeout: float = 1800.0
    """Seconds that the processes of torchrun wait for each other before the job ends with a message of who did what. One that
    gives no sign of life at all is given up after a minute, or half of this if that is less."""

    distributed: bool = False
    """Make sure that this was started by torchrun; ranks join anyway where it was."""

    memory_snapshot: Path | None = None
    """If device memory grows, write PyTorch's memory snapshot here and name the lines that hold it; costs some time."""

    @property
    def precision_name(self) -> PrecisionName:
        """What is computed in 16 bits, by whichever flag it was asked for."""
        return self.mixed_precision

    @property
    def targets(self) -> tuple[Path, ...]:
        """Files that the run writes, one for each place."""
        return self.output_dir / "x", *([] if self.memory_snapshot is None else [self.memory_snapshot])

    def check(self) -> None:
        super().check()
        check_least(
            ("--num-steps", self.num_steps, 1),
            ("--num-epochs", self.num_epochs, 1),
            ("--batch-size", self.batch_size, 1),
            ("--gradient-accumulation", self.gradient_accumulation, 1),
            ("--learning-rate", self.learning_rate, 0),
            ("--warmup-steps", self.warmup_steps, 0),
            ("--weight-decay", self.weight_decay, 0),
            ("--clip-norm", self.clip_norm, 0),
            ("--save-every", self.save_every, 0),
            ("--keep", self.keep, 1),
            ("--log-every", self.log_every, 1),
            ("--validate-every", self.validate_every, 0),
            ("--workers", self.workers, 0),
            ("--shard-size", self.shard_size, 1),
            ("--rank-timeout", self.rank_timeout, 1),
        )
        if self.shard_size is not None and self.parallel != "hsdp":
            raise UsageError("--shard-size is for --parallel hsdp.", fix="Give both, or leave it away.")
        if self.is_sharded and self.cuda_graphs:
            raise UsageError(f"--cuda-graphs does not go with --parallel {self.parallel}.", fix="Leave one of them away.")
        check_shares(("--ema-decay", self.ema_decay))
        if not self.use_ema:
            check_idle(self, "--use-ema", "ema_decay")

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold slices of what they train."""
        return self.parallel in ("fsdp", "hsdp")


def check_least(*values: tuple[str, float | None, float]) -> None:
    """Raise ``UsageError`` for a flag whose value is below its least."""
    for flag, value, least in values:
        if value is not None and value < least:
            raise UsageError(f"{flag} {value} is out of range.", fix=f"Give {least} or more.")


def check_idle(config: CommandConfig, needs: str, *names: str) -> None:
    """Raise ``UsageError`` for a field that is not as it is by default and changes nothing without the flags in ``needs``."""
    for field in dataclasses.fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            flag = flag_name(field.name)
            raise UsageError(f"{flag} changes nothing without {needs}.", fix=f"Add {needs}, or leave {flag} away.")


def check_shares(*values: tuple[str, float]) -> None:
    """Raise ``UsageError`` for a flag whose value is not between 0 and 1."""
    for flag, value in values:
        if not 0 <= value <= 1:
            raise UsageError(f"{flag} {value} is not a share.", fix="Give a number from 0 to 1.")
