"""``wandistiller export``: a checkpoint in another dialect or precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wandistiller.config.command import CommandConfig
from wandistiller.errors import UsageError
from wandistiller.files import expand_home


@dataclass(frozen=True, kw_only=True)
class ExportConfig(CommandConfig):
    """Write a Wan checkpoint in another format, reload it, and prove it equal to its source before saying so."""

    model: str | None = None
    """What to export: a transformer or VAE in any dialect (file, shard index, folder), or a whole pipeline (diffusers
    folder, hub id, folder of original Wan files, or 'tiny')."""

    output: Path | None = None
    """Where to: a folder for --format diffusers and for whole pipelines, else a .safetensors file."""

    format: Literal["diffusers", "comfyui", "original"] = "diffusers"
    """diffusers: a folder that from_pretrained loads. comfyui: one file with ComfyUI's key prefix. original: the same
    without the prefix, as the authors of Wan name the keys."""

    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Precision to store. 'keep' stores what the source stores, 8-bit weights multiplied out to bfloat16."""

    overwrite: bool = False
    """Replace --output if it exists. Without this an existing file or folder is an error."""

    def check(self) -> None:
        if self.model is None or self.output is None:
            missing = "--model" if self.model is None else "--output"
            raise UsageError(f"{missing} is missing.", fix="Say what to export with --model and where to with --output.")
        if self.output.exists() and not self.overwrite and (self.output.is_file() or any(self.output.iterdir())):
            raise UsageError(f"{self.output} exists.", fix="Choose another --output, or add --overwrite.")
        source, output = expand_home(self.model).absolute(), expand_home(self.output).absolute()
        if source == output or output in source.parents:
            raise UsageError(
                f"--output {self.output} holds what is to be exported.",
                fix="Choose a place outside of it; nothing was changed.",
            )
