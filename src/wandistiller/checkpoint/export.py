"""The job of ``wandistiller export``: one model or a whole pipeline, written, reloaded, proved, and only then in place."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch

from wandistiller.checkpoint.proof import write_and_prove
from wandistiller.config.export import ExportConfig
from wandistiller.errors import UsageError
from wandistiller.files import complete_or_absent, expand_home
from wandistiller.models.channel_adapter import CONFIG_NAME as ADAPTER_CONFIG
from wandistiller.models.channel_adapter import WEIGHTS_NAME as ADAPTER_WEIGHTS
from wandistiller.models.devices import DTYPES
from wandistiller.models.pipeline import Pipeline, find_pipeline
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import StoredModel, inspect_checkpoint
from wandistiller.models.student_facts import FACT_FILES
from wandistiller.terminal import say
from wandistiller.units import Bytes

_MODEL_PARTS = ("transformer", "transformer_2", "vae")
_OTHER_PARTS = ("text_encoder", "tokenizer", "scheduler", "image_encoder", "image_processor")


@dataclass(frozen=True)
class Exported:
    """One model that has been written and proved."""

    path: Path
    architecture: str
    num_tensors: int
    num_bytes: Bytes


def run_export(config: ExportConfig) -> list[Exported]:
    """Do the whole job; nothing appears at ``config.output`` unless all of it is proved."""
    config.check()
    assert config.model is not None and config.output is not None  # check() has made sure
    dtype = None if config.dtype == "keep" else DTYPES[config.dtype]
    source = expand_home(config.model)
    if _is_single_model(source):
        exported = [_export_model(inspect_checkpoint(source), config.output, config.format, dtype)]
    else:
        exported = _export_pipeline(config, dtype)
    for model in exported:
        rounding = "" if dtype is None else f" once rounded to {config.dtype}"
        say(f"Wrote {model.path} ({model.num_bytes}): {model.num_tensors} tensors, reloaded, equal to the source{rounding}")
    return exported


def _is_single_model(source: Path) -> bool:
    if source.is_file():
        return True
    is_pipeline = (source / "model_index.json").is_file() or (source / "high_noise_model").is_dir()
    return source.is_dir() and not is_pipeline and not any("vae" in file.name.lower() for file in source.iterdir())


def _export_model(stored: StoredModel, output: Path, format_name: str, dtype: torch.dtype | None) -> Exported:
    if format_name != "diffusers" and output.suffix != ".safetensors":
        raise UsageError(f"--output {output} is one file in this format.", fix="End it with .safetensors.")
    if format_name == "diffusers" and output.suffix == ".safetensors":
        raise UsageError(f"--output {output} is a folder in this format.", fix="Leave .safetensors away.")
    with complete_or_absent(output) as partial:
        write_and_prove(stored, partial, format_name, dtype)
    return _describe(stored, output)


def _export_pipeline(config: ExportConfig, dtype: torch.dtype | None) -> list[Exported]:
    assert config.model is not None and config.output is not None
    wanted = _MODEL_PARTS + (_OTHER_PARTS if config.format == "diffusers" else ())
    pipeline = find_pipeline(config.model, wanted)
    stored = {name: inspect_checkpoint(pipeline.parts[name]) for name in _MODEL_PARTS if name in pipeline.parts}
    if config.output.suffix == ".safetensors":
        raise UsageError(f"--output {config.output} is one file; a pipeline has several.", fix="Name a folder.")
    suffix = "" if config.format == "diffusers" else ".safetensors"
    with complete_or_absent(config.output) as partial:
        partial.mkdir()
        for name, model in stored.items():
            write_and_prove(model, partial / f"{name}{suffix}", config.format, dtype)
        if config.format == "diffusers":
            _copy_other_parts(pipeline, partial)
    return [_describe(model, config.output / f"{name}{suffix}") for name, model in stored.items()]


def _copy_other_parts(pipeline: Pipeline, folder: Path) -> None:
    """Copy what is not converted, and the index that names the parts."""
    for name in _OTHER_PARTS:
        if name in pipeline.parts:
            shutil.copytree(pipeline.parts[name], folder / name)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *FACT_FILES):
        if (pipeline.folder / name).is_file():
            shutil.copyfile(pipeline.folder / name, folder / name)
    index = pipeline.folder / "model_index.json"
    if index.is_file():
        shutil.copyfile(index, folder / "model_index.json")
        return
    say(f"{pipeline.source} has no text encoder in diffusers form: sample what was written with --cond, or add one")
    classes = {"transformer": "WanTransformer3DModel", "transformer_2": "WanTransformer3DModel", "vae": "AutoencoderKLWan"}
    content = {
        "_class_name": "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": pipeline.boundary or (SIZES["wan2.2-a14b"].boundary if "transformer_2" in pipeline.parts else None),
        "expand_timesteps": pipeline.expand_timesteps,
        **{part: ["diffusers", name] for part, name in classes.items() if part in pipeline.parts},
    }
    (folder / "model_index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _describe(stored: StoredModel, path: Path) -> Exported:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    size = Bytes(sum(file.stat().st_size for file in files))
    return Exported(path, stored.architecture.name, len(stored.names), size)
