"""Where the parts of a Wan pipeline lie, without reading any of them.

A pipeline is a diffusers folder or hub id, a folder of original Wan files, or ``tiny``, the one in the box. Only the parts
that a job asks for are looked for, and from a hub only those are downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandistiller.errors import CheckpointError, UsageError, nearest
from wandistiller.models.sizes import SIZES
from wandistiller.models.tiny import tiny_pipeline_folder

_PIPELINE_CLASSES = ("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What each part is made of in a diffusers folder; weights in other formats beside them are never downloaded.
_HUB_PATTERNS = ("{part}/*.json", "{part}/*.safetensors", "{part}/*.model", "{part}/*.txt")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The parts by name (``transformer``, ``transformer_2``, ``vae``, ``text_encoder``, ``tokenizer``, ...) and settings."""

    source: str
    parts: Mapping[str, Path]
    boundary: float | None = None
    """Sigma at which ``transformer_2`` takes over."""
    expand_timesteps: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    def part(self, name: str) -> Path:
        """Return where a part lies; raise ``CheckpointError`` if this pipeline has none."""
        if name not in self.parts:
            raise CheckpointError(
                f"{self.source} has no {name.replace('_', ' ')}.",
                why=f"its parts are {', '.join(sorted(self.parts)) or 'none'}.",
                fix="Point --model to a complete pipeline, or give the missing part with its own flag.",
            )
        return self.parts[name]

    @property
    def shift(self) -> float | None:
        """The schedule's shift that the pipeline was saved with."""
        value = self.scheduler.get("flow_shift", self.scheduler.get("shift"))
        return None if value is None else float(value)

    @property
    def solver(self) -> str:
        """The solver that the pipeline was saved with; the released ones have UniPC."""
        return "euler" if "Euler" in str(self.scheduler.get("_class_name", "")) else "unipc"


def find_pipeline(source: str, parts: Collection[str] = ()) -> Pipeline:
    """Locate a pipeline; ``parts`` are those that the job will read, and all that is fetched from a hub."""
    if source == "tiny":
        return _read_diffusers_folder(tiny_pipeline_folder(), source)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if (folder / "model_index.json").is_file():
            return _read_diffusers_folder(folder, source)
        return _read_original_folder(folder, source)
    if folder.exists():
        raise UsageError(f"{source} is a file, not a pipeline.", fix="Give a single file of weights as --checkpoint.")
    if source in SIZES:
        raise UsageError(
            f"'{source}' is the name of a size, not a checkpoint.",
            fix=f"Point to the folder with its weights, or to its hub id such as Wan-AI/{_hub_name(source)}.",
        )
    if _HUB_ID.fullmatch(source):
        return _read_diffusers_folder(_download(source, parts), source)
    raise UsageError(
        f"There is no pipeline '{source}'{nearest(source, ['tiny'])}",
        why="it is neither a folder here nor a hub id (owner/name).",
        fix="Check the path for a typing error.",
    )


def _read_diffusers_folder(folder: Path, source: str) -> Pipeline:
    index = _read_json(folder / "model_index.json")
    class_name = index.get("_class_name")
    if class_name not in _PIPELINE_CLASSES:
        raise CheckpointError(
            f"{source} is a {class_name}, not a Wan pipeline.", fix=f"Use one of: {', '.join(_PIPELINE_CLASSES)}."
        )
    listed = [name for name, kind in index.items() if isinstance(kind, list) and kind[0] is not None]
    scheduler = folder / "scheduler" / "scheduler_config.json"
    return Pipeline(
        source=source,
        parts={name: folder / name for name in listed if (folder / name).is_dir()},
        boundary=index.get("boundary_ratio"),
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        scheduler=_read_json(scheduler) if scheduler.is_file() else {},
    )


def _read_original_folder(folder: Path, source: str) -> Pipeline:
    """Understand a folder as released by the authors of Wan: transformer at the top, or one folder an expert."""
    parts: dict[str, Path] = {}
    experts = (folder / "high_noise_model", folder / "low_noise_model")
    vaes = (
        sorted(folder.glob("*VAE*.pth")) + sorted(folder.glob("*VAE*.safetensors")) + sorted(folder.glob("*vae*.safetensors"))
    )
    boundary = None
    if all(expert.is_dir() for expert in experts):
        parts["transformer"], parts["transformer_2"] = experts
        boundary = SIZES["wan2.2-a14b"].boundary
    elif (folder / "config.json").is_file():
        parts["transformer"] = folder
    if not parts:
        raise CheckpointError(
            f"{source} is not a Wan pipeline.",
            why="it has neither a model_index.json (diffusers) nor a config.json or expert folders (original Wan).",
            fix="Point to the folder that has one of these, or give single files with --checkpoint and --vae-checkpoint.",
        )
    if len(vaes) == 1:
        parts["vae"] = vaes[0]
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return Pipeline(source=source, parts=parts, boundary=boundary, expand_timesteps=config.get("model_type") == "ti2v")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read.", why=str(error), fix="Copy or download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.", fix="Copy or download it again.")
    return content


def _download(repo: str, parts: Collection[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["model_index.json", "scheduler/*.json"]
    wanted += [pattern.format(part=part) for part in parts for pattern in _HUB_PATTERNS]
    try:
        return Path(snapshot_download(repo, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UsageError(
            f"'{repo}' is neither a folder here nor could it be fetched from the hub.",
            why=str(error).strip().splitlines()[0],
            fix="Check the name and the network, or download it elsewhere and point --model to the folder.",
        ) from error


def _hub_name(size: str) -> str:
    return {
        "wan2.1-1.3b": "Wan2.1-T2V-1.3B-Diffusers",
        "wan2.1-14b": "Wan2.1-T2V-14B-Diffusers",
        "wan2.2-5b": "Wan2.2-TI2V-5B-Diffusers",
        "wan2.2-a14b": "Wan2.2-T2V-A14B-Diffusers",
    }[size]
