"""What a finished run left in its folder: settings, metrics, the model."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wandistiller.config.distill import DistillConfig
from wandistiller.config.toml_file import read_config
from wandistiller.config.train import TrainConfig
from wandistiller.errors import UsageError
from wandistiller.units import Bytes

_COMMANDS: dict[str, type[DistillConfig] | type[TrainConfig]] = {"distill": DistillConfig, "train": TrainConfig}


@dataclass(frozen=True)
class Metrics:
    """The lines of ``metrics.jsonl``."""

    lines: Sequence[Mapping[str, float]]

    @property
    def names(self) -> list[str]:
        """All that was measured, in the order in which it first was."""
        found = dict.fromkeys(name for line in self.lines for name in line)
        return [name for name in found if name not in ("step", "time")]

    def over_steps(self, name: str) -> list[tuple[float, float]]:
        return [(line["step"], line[name]) for line in self.lines if line.get(name) is not None]

    def over_minutes(self, name: str) -> list[tuple[float, float]]:
        minutes = self._minutes()
        return [(minute, line[name]) for minute, line in zip(minutes, self.lines, strict=True) if line.get(name) is not None]

    @property
    def step(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def minutes(self) -> float:
        """Time spent in training, in all parts of a run that was resumed."""
        return self._minutes()[-1] if self.lines else 0.0

    @property
    def memory_peaks(self) -> dict[str, Bytes]:
        """The most that was measured while training, of the host and of each device."""
        peaks: dict[str, float] = {}
        for line in self.lines:
            for name, value in line.items():
                parts = name.split("/")
                if value is None or parts[0] != "memory" or parts[-1] not in ("host_gb", "peak_gb"):
                    continue
                place = "host" if parts[-1] == "host_gb" else parts[1]
                peaks[place] = max(peaks.get(place, 0.0), value)
        return {place: Bytes(round(value * 1e9)) for place, value in peaks.items()}

    def _minutes(self) -> list[float]:
        """Return the time of each line; clocks begin anew where a run was resumed."""
        found, before, last = [], 0.0, 0.0
        for line in self.lines:
            if line["time"] < last:
                before += last
            last = line["time"]
            found.append((before + last) / 60)
        return found


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run that has ended."""

    folder: Path
    config: DistillConfig | TrainConfig
    metrics: Metrics

    @property
    def command(self) -> str:
        return self.config.command

    @property
    def predicted(self) -> dict[str, Bytes]:
        """What the run said beforehand that it would use, by place; nothing where it said nothing."""
        if not self._plan:
            return {}
        place = "host" if self._plan["device"] == "cpu" else self._plan["device"]
        return {place: Bytes(self._plan["predicted"]["in_use"])}

    @property
    def memory_peaks(self) -> dict[str, Bytes]:
        """The most that was measured while training, by place: in the metrics, and of the host also between their lines."""
        peaks = self.metrics.memory_peaks
        if self._plan.get("device") == "cpu" and "measured" in self._plan:
            peaks["host"] = max(peaks.get("host", Bytes(0)), Bytes(self._plan["measured"]["bytes"]))
        return peaks

    @cached_property
    def _plan(self) -> dict[str, Any]:
        """What was foreseen and measured; nothing where nothing was foreseen."""
        file = self.folder / "plan.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def base(self) -> str:
        """What it started from: the teacher, or the model that was trained further."""
        found = self.config.teacher_path if isinstance(self.config, DistillConfig) else self.config.model
        assert found is not None  # the run checked it
        return found


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder; raise ``UsageError`` that says what is missing from it."""
    if not folder.is_dir():
        raise UsageError(f"--run {folder} is not a folder.", fix="Name the --output-dir of a distillation.")
    settings = folder / "run.toml"
    if not settings.is_file():
        raise UsageError(
            f"{folder} is not the folder of a run.",
            why="it has no run.toml, which every training writes before its first step.",
            fix="Name the --output-dir of a distillation.",
        )
    config = _read_settings(settings)
    if isinstance(config, TrainConfig) and config.lora_rank:
        raise UsageError(f"{folder} is a training of LoRA adapters.", fix="Name a run that has all weights.")
    if not (folder / "model" / "model_index.json").is_file():
        raise UsageError(
            f"{folder} has no model yet.",
            why="the model is written after the last step.",
            fix=f"Finish the run: wandistiller {config.command} --config {settings} --resume auto",
        )
    if not (folder / "metrics.jsonl").is_file():
        raise UsageError(f"{folder} has no metrics.jsonl.", fix="Put the file back beside run.toml, or train again.")
    return RunFolder(folder=folder, config=config, metrics=Metrics(_read_lines(folder / "metrics.jsonl")))


def _read_settings(path: Path) -> DistillConfig | TrainConfig:
    try:
        tables = list(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read.", why=str(error), fix="Restore the file from a copy.") from error
    for command, config_class in _COMMANDS.items():
        if command in tables:
            return read_config(path, config_class, command, _COMMANDS)
    raise UsageError(
        f"{path} is of a run of {', '.join(tables) or 'nothing'}.", fix="Name a run of distill, or of train with all weights."
    )


def _read_lines(path: Path) -> list[Mapping[str, float]]:
    found: list[Mapping[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:  # the last line of a run that was killed may be cut short
            continue
        if isinstance(values, dict) and {"step", "time"} <= values.keys():
            found.append(values)
    return found
