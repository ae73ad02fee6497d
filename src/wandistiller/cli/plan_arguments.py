"""``wandistiller plan COMMAND [flags]``: the planner's flags stand among those of the planned command."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wandistiller.cli.arguments import parse_flags
from wandistiller.config.command import CommandConfig, flag_name
from wandistiller.config.plan import PLANNED, PlanConfig, PlanRequest
from wandistiller.config.presets import find_preset
from wandistiller.config.toml_file import read_toml
from wandistiller.errors import UsageError, nearest

# What a command needs to be run and a plan does not; taken where nothing is given.
_STAND_INS: dict[str, dict[str, Any]] = {
    "train": {"dataset_path": "your-data"},
    "train-vae": {"dataset_path": "your-data"},
    "distill": {"dataset_path": "your-data"},
    "sample": {"prompt": ("a prompt",)},
}


_INSTEAD = ("data_path", "prompt_file", "cond")
"""What may be given in the place of these."""


def parse_plan(flags: Sequence[str], parse: Callable[[str, Sequence[str], str], Any]) -> PlanRequest:
    """Return what to plan; ``parse`` reads the configuration of a command from its flags."""
    if not flags or flags[0] in ("-h", "--help"):
        parse_flags(PlanConfig, ["--help"], PlanConfig(), f"wandistiller plan {{{','.join(PLANNED)}}}")
    command, rest = flags[0], list(flags[1:])
    if command not in PLANNED:
        raise UsageError(f"There is no plan for '{command}'{nearest(command, PLANNED)}", fix=f"Plan {', '.join(PLANNED)}.")
    prog = f"wandistiller plan {command}"
    own, job_flags = _split(rest)
    if {"-h", "--help"} & {*rest}:
        print(f"The flags of plan stand among those of {command} (wandistiller {command} --help):\n")
        parse_flags(PlanConfig, ["--help"], PlanConfig(), prog)
    options = parse_flags(PlanConfig, own, PlanConfig(), prog)
    _check_names(job_flags)
    job: CommandConfig = parse(command, job_flags, prog)
    given = _given(job_flags, job, command)
    stand_ins = {name: value for name, value in _STAND_INS[command].items() if getattr(job, name) in (None, ())}
    if any(getattr(job, name, None) is not None for name in _INSTEAD):
        stand_ins = {}
    if command == "sample" and "output" not in given and (getattr(job, "frames", None) or 1) > 1:
        stand_ins["output"] = Path("sample.mp4")
    return PlanRequest(command=command, job=dataclasses.replace(job, **stand_ins), given=given, options=options)


def _check_names(flags: Sequence[str]) -> None:
    """Raise ``UsageError`` for what looks like a flag of the planner's own, and is none."""
    known = [flag_name(field.name) for field in dataclasses.fields(PlanConfig)]
    for flag in (each.partition("=")[0] for each in flags if each.startswith("--")):
        close = nearest(flag, known, cutoff=0.85)
        if close and flag not in known:
            raise UsageError(f"There is no flag {flag}{close}", fix="Correct it, or leave it away.")


def _split(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the planner's flags with their values, and the rest."""
    fields = {field.name: field for field in dataclasses.fields(PlanConfig) if field.name != "config"}
    own: list[str] = []
    others: list[str] = []
    index = 0
    while index < len(flags):
        name = flags[index].partition("=")[0].removeprefix("--").replace("-", "_")
        is_own = flags[index].startswith("--") and name in fields
        target = own if is_own else others
        target.append(flags[index])
        takes_value = is_own and "=" not in flags[index] and not isinstance(fields[name].default, bool)
        if takes_value and index + 1 < len(flags):
            index += 1
            own.append(flags[index])
        index += 1
    return own, others


def _given(flags: Sequence[str], job: CommandConfig, command: str) -> frozenset[str]:
    """Return the fields that were set by flags, by a file, or by a preset."""
    fields = {field.name for field in dataclasses.fields(job)}
    found = set()
    for flag in flags:
        if flag.startswith("--"):
            name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
            found.add(name if name in fields else name.removeprefix("no_"))
    if job.config is not None:
        content = read_toml(Path(job.config))
        found |= {key.replace("-", "_") for key in (*content, *content.get(command, {}))}
    preset = getattr(job, "preset", None)
    if preset is not None:
        found |= set(find_preset(command, preset))
    for alias, field in _ALIASES.items():
        if alias in found:
            found |= set(field)
    return frozenset(found & fields)


_ALIASES = {
    "gradient_checkpointing": ("activation_policy",),
    "use_8bit_adam": ("optimizer",),
    "teacher_on_cpu": ("teacher_device_strategy",),
    "balanced_teacher": ("teacher_device_strategy",),
    "offload_to_cpu": ("placement",),
}
