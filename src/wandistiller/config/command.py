"""What all commands' configurations have in common."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wandistiller.errors import UsageError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
SolverName = Literal["auto", "euler", "unipc"]


@dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """Base of a command's configuration; precedence is defaults, then ``--config``, then flags."""

    config: Path | None = None
    """TOML file with any of the flags below as keys; flags on the command line win. Keep one beside each experiment."""

    def check(self) -> None:
        """Raise ``UsageError`` where values do not go together; needs no model and no device.

        Here, what holds for all commands: numbers are finite, and a seed is one that PyTorch takes.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                what = f"{flag_name(field.name)} {value} is not a finite number."
                raise UsageError(what, why="nothing can be computed with it.", fix="Give a number.")
            if field.name == "seed" and not 0 <= value < 2**63:
                why = "generators of random numbers take 63 bits."
                raise UsageError(f"--seed {value} is out of range.", why=why, fix="Give a number from 0 to 2**63 - 1.")


def flag_name(field: str) -> str:
    """Return the flag of a configuration's field."""
    return "--" + field.replace("_", "-")


def flag_words(changes: Mapping[str, Any]) -> list[str]:
    """Return fields of a configuration as one types them."""
    words: list[str] = []
    for name, value in changes.items():
        flag = flag_name(name)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def launch_words(num_nodes: int, num_ranks: int) -> list[str]:
    """Return what stands before a command that torchrun starts, ``num_ranks`` times on each machine.

    Several machines meet on one of them, which the user knows the name of: it stands for ``first``.
    """
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=first:29500"]
    return ["torchrun", *([f"--nnodes={num_nodes}", *meeting] if num_nodes > 1 else []), f"--nproc-per-node={num_ranks}", "-m"]


def command_line(command: str, config: CommandConfig, changes: Mapping[str, Any]) -> str:
    """Return what to type for this configuration with some fields changed, in the way that this process was started."""
    words = ["wandistiller", command]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        nodes = int(os.environ.get("WORLD_SIZE", local)) // int(local)
        words = [*launch_words(nodes, int(local)), *words]
    for field in dataclasses.fields(config):
        value = changes.get(field.name, getattr(config, field.name))
        # What came from a file is spelled out, so the file is not needed again.
        if field.name == "config" or value == field.default or value is None:
            continue
        words += flag_words({field.name: value})
    return shlex.join(words)
