"""``wandistiller plan``: what a job would take and how fast it would be, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from wandistiller.config.command import CommandConfig
from wandistiller.errors import UsageError
from wandistiller.units import Bytes

PLANNED = ("distill", "train", "train-vae", "sample")
"""Commands that can be planned."""
_FIXES = {
    "--gpu": "Give a card's memory, such as 24GiB; --gpus 0 plans for the CPU alone.",
    "--ram": "Give 64GiB, for instance.",
}


@dataclass(frozen=True, kw_only=True)
class PlanConfig(CommandConfig):
    """Say in gigabytes and seconds what a command would take on a machine, and which flags suit it best.

    Write `wandistiller plan`, then the command as you would run it, with any of the flags below among its own. What you give is
    kept; what you leave open is chosen. A model can be a folder, or the name of a size that you have not downloaded:
    wan2.1-1.3b, wan2.1-14b, wan2.2-5b, wan2.2-a14b. No weights are read and no GPU is needed.
    """

    card: str | None = None
    """Card to plan for, by name: rtx4090, a100-80gb, h200, ... Default: the one in this machine."""

    gpu: str | None = None
    """Memory of the card to plan for, such as 24GiB; without --card its speed is taken from the H200."""

    gpus: int | None = None
    """Cards in each machine, one for each process of torchrun, or all for the one that draws or spreads a teacher; 0 plans for
    the CPU alone."""

    nodes: int = 1
    """Machines, each with --gpus cards."""

    ram: str | None = None
    """Host memory of the machine to plan for, such as 64GiB. Default: what is free here; for another card, all that is here."""

    bus: str | None = None
    """Host to card, such as 25GB/s. Default: measured here, or 25GB/s for another machine."""

    disk: str | None = None
    """Reading from disk, such as 3GB/s. Default: measured here on the model's own files, or 2GB/s."""

    network: str | None = None
    """Between machines, for each card, such as 25GB/s. Default: 10GB/s."""

    top: int = 5
    """How many of the plans that fit are shown."""

    json: bool = False
    """Print JSON for programs instead of tables for people."""

    write: Path | None = None
    """Write the best plan here as a TOML file, for --config of the planned command."""

    verify: bool = False
    """Take a few real steps under the best plan, with random weights, and print predicted against measured. Needs a GPU."""

    def check(self) -> None:
        for flag, value, least in (("--gpus", self.gpus, 0), ("--nodes", self.nodes, 1), ("--top", self.top, 1)):
            if value is not None and value < least:
                raise UsageError(f"{flag} {value} is too small.", fix=f"Give {least} or more.")
        for flag, size in (("--gpu", self.gpu), ("--ram", self.ram)):
            if size is not None and _of_flag(flag, size, Bytes.parse) == 0:
                raise UsageError(f"{flag} {size} is no memory at all.", fix=_FIXES[flag])
        for flag, rate in (("--bus", self.bus), ("--disk", self.disk), ("--network", self.network)):
            if rate is not None and _of_flag(flag, rate, parse_rate) == 0:
                raise UsageError(f"{flag} {rate} would take for ever.", fix="Give a rate above 0, such as 25GB/s.")
        if self.gpus == 0 and (self.card or self.gpu):
            raise UsageError("--gpus 0 is for a machine without a GPU.", fix="Leave it away, or --card and --gpu.")
        if self.write is not None and self.write.suffix != ".toml":
            raise UsageError(f"--write {self.write} is no TOML file.", fix="End it with .toml.")
        if self.write is not None and self.write.is_dir():
            raise UsageError(f"--write {self.write} is a folder.", fix="Name a file in it.")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A command to plan, and for what."""

    command: str
    job: CommandConfig
    given: frozenset[str] = field(default_factory=frozenset)
    """Fields of the job that the user has set, and that are kept."""
    options: PlanConfig = field(default_factory=PlanConfig)

    def check(self) -> None:
        """Raise ``UsageError`` where values do not go together."""
        if self.command not in PLANNED:
            raise UsageError(f"There is no plan for '{self.command}'.", fix=f"Plan {', '.join(PLANNED)}.")
        self.options.check()
        self.job.check()


def parse_rate(text: str) -> float:
    """Read ``25GB/s`` as bytes a second."""
    size, _, unit = text.partition("/")
    try:
        rate = Bytes.parse(size) if unit.strip() in ("", "s") else None
    except UsageError:
        rate = None
    if rate is None:
        raise UsageError(f"'{text}' is not a rate.", fix="Write a size a second with its unit, such as 25GB/s.")
    return float(rate)


def _of_flag(flag: str, text: str, parse: Callable[[str], float]) -> float:
    """Read a flag's value, and say which flag it is of where it cannot be read."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error.what}", why=error.why, fix=error.fix) from error
