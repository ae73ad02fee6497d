"""``wandistiller <command> [flags]``.

The commands are a table of names; a command's configuration is imported to parse its flags, and the rest of the program
only when it runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistiller.cli.arguments import parse_flags
from wandistiller.cli.plan_arguments import parse_plan
from wandistiller.config.command import CommandConfig
from wandistiller.config.presets import find_preset
from wandistiller.config.toml_file import read_config
from wandistiller.distributed.failures import end_rank, is_rank
from wandistiller.errors import UsageError, WanDistillerError, nearest


@dataclass(frozen=True)
class Command:
    """One command: where its configuration is, and what it is for."""

    config: str
    summary: str

    def config_class(self) -> type[CommandConfig]:
        module, _, name = self.config.partition(":")
        found: type[CommandConfig] = getattr(importlib.import_module(f"wandistiller.config.{module}"), name)
        return found


COMMANDS: dict[str, Command] = {
    "distill": Command("distill:DistillConfig", "make a smaller model that draws what a large one draws"),
    "train": Command("train:TrainConfig", "fine-tune with flow matching on pictures and clips, full or LoRA"),
    "train-vae": Command("train_vae:TrainVaeConfig", "train or fine-tune a VAE with KL, LPIPS and a critic"),
    "lpips": Command("lpips:LpipsConfig", "convert the weights of the perceptual loss, once, for train-vae --use-lpips"),
    "encode": Command("encode:EncodeConfig", "write the caches of text embeddings and latents that training reads"),
    "sample": Command("sample:SampleConfig", "generate pictures and clips from a checkpoint"),
    "report": Command("report:ReportConfig", "write one page about a run: teacher and student side by side, marks, curves"),
    "plan": Command("plan:PlanConfig", "say what a command takes on a machine, in gigabytes and seconds, before it runs"),
    "export": Command("export:ExportConfig", "write a checkpoint in another format, and prove it equal"),
    "doctor": Command("doctor:DoctorConfig", "check this machine: devices, precisions, memory, buses, disk"),
}
_OPTIONAL_VALUES = {"--output-latent"}
"""Flags that may stand without a value."""


def start(arguments: Sequence[str] | None = None) -> int:
    """Be the program: ``main`` in a process of its own."""
    let_segments_grow()
    return main(arguments)


def let_segments_grow() -> None:
    """Tell PyTorch, before it is imported, that its memory grows in place, unless the user says otherwise.

    Batches of many shapes then leave no fragments behind.
    """
    if sys.platform == "linux" and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 2 for wrong input, 1 for anything else that went wrong."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"wandistiller {version('wandistiller')}")
        return 0
    name, flags = arguments[0], arguments[1:]
    try:
        if name not in COMMANDS:
            raise UsageError(f"There is no command '{name}'{nearest(name, COMMANDS)}", fix=f"Use one of {', '.join(COMMANDS)}.")
        config = _parse_as_rank(name, flags) if is_rank() else parse(name, flags)
        config.check()
        return run(name, config)
    except WanDistillerError as error:
        if is_rank():
            end_rank(error, error.exit_code)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever reads has seen enough: `wandistiller doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if not is_rank():
            raise
        end_rank(error, 1)


def parse(name: str, flags: Sequence[str], prog: str | None = None) -> Any:
    """Return the command's configuration: defaults, then the file of ``--config``, then flags.

    ``prog`` is what the program is called in messages and help, where that is not its name and the command's.
    """
    if name == "plan":
        return parse_plan(flags, parse)
    config_class = COMMANDS[name].config_class()
    flags = _fill_optional_values(flags)
    path, preset = _value_of("--config", flags), _value_of("--preset", flags)
    if path is not None:
        default = read_config(Path(path), config_class, name, COMMANDS, preset)
    else:
        default = config_class(**find_preset(name, preset)) if preset is not None else config_class()
    return parse_flags(config_class, flags, default, prog or f"wandistiller {name}")


def _parse_as_rank(name: str, flags: Sequence[str]) -> Any:
    """The same for a process of torchrun, which shows errors and not what is printed while a process ends by itself."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            config = parse(name, flags)
    except SystemExit as end:
        if not end.code:  # help was asked for
            raise
        raise UsageError(f"The flags of {name} cannot be understood.\n{printed.getvalue().strip()}") from end
    print(printed.getvalue(), end="", file=sys.stderr)
    return config


def run(name: str, config: CommandConfig) -> int:
    """Call the Python function of a command; a function may return an exit code."""
    from wandistiller.terminal import quiet_libraries

    quiet_libraries()
    from wandistiller import api

    gc.freeze()  # what was imported stays, and looking through it takes a quarter of a second each time
    result = getattr(api, name.replace("-", "_"))(config)
    return int(getattr(result, "exit_code", 0))


def _value_of(name: str, flags: Sequence[str]) -> str | None:
    for index, flag in enumerate(flags):
        if flag == name and index + 1 < len(flags):
            return flags[index + 1]
        if flag.startswith(f"{name}="):
            return flag.removeprefix(f"{name}=")
    return None


def _fill_optional_values(flags: Sequence[str]) -> list[str]:
    filled: list[str] = []
    for flag, following in itertools.zip_longest(flags, flags[1:], fillvalue="--"):
        filled.append(flag)
        if flag.replace("_", "-") in _OPTIONAL_VALUES and following.startswith("-"):
            filled.append("auto")
    return filled


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: wandistiller <command> [flags]",
            "",
            "Distil, fine-tune and sample Wan video diffusion models on the hardware you have.",
            "",
            "commands:",
            *lines,
            "",
            "wandistiller <command> --help explains every flag. Start with: wandistiller sample --model tiny --prompt hello",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
