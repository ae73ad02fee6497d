"""Where the parts of a Wan pipeline lie, without reading any of them.

A pipeline is a diffusers folder or hub id, a folder of original Wan files, ``tiny``, the trained one in the box, or
``tiny-random``. Only the parts that a job asks for are looked for, and from a hub only those are downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wandistiller.errors import CheckpointError, UsageError, nearest
from wandistiller.files import expand_home
from wandistiller.models.box import box_pipeline_folder
from wandistiller.models.channel_adapter import ADAPTER_NAME
from wandistiller.models.sizes import HUB_IDS, SIZES
from wandistiller.models.student_facts import FACT_FILES
from wandistiller.models.tiny import random_tiny_folder

_PIPELINE_CLASSES = ("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline")
# Pipelines that a name stands for, wherever one is.
_NAMED: Mapping[str, Callable[[], Path]] = {"tiny": box_pipeline_folder, "tiny-random": random_tiny_folder}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What each part is made of in a diffusers folder; weights in other formats beside them are never downloaded.
_HUB_PATTERNS = ("{part}/*.json", "{part}/*.safetensors", "{part}/*.model", "{part}/*.txt")


# The schedulers that we draw the same with: the solver's name, and the settings under which that holds.
_COMMON_SETTINGS: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
}
_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "FlowMatchEulerDiscreteScheduler": ("euler", {**_COMMON_SETTINGS, "invert_sigmas": False, "stochastic_sampling": False}),
    "UniPCMultistepScheduler": (
        "unipc",
        {
            **_COMMON_SETTINGS,
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
            "solver_order": 2,
            "solver_type": "bh2",
            "predict_x0": True,
            "lower_order_final": True,
            "disable_corrector": [],
            "final_sigmas_type": "zero",
            "thresholding": False,
            "solver_p": None,
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The parts by name (``transformer``, ``transformer_2``, ``vae``, ``text_encoder``, ``tokenizer``, ...) and settings."""

    source: str
    folder: Path
    parts: Mapping[str, Path]
    flag: str = "--model"
    """What the user named it with."""
    boundary: float | None = None
    """Sigma at which ``transformer_2`` takes over."""
    expand_timesteps: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    def part(self, name: str) -> Path:
        """Return where a part lies; raise ``CheckpointError`` if this pipeline has none."""
        if name not in self.parts:
            instead = {
                "vae": ", or give one with --vae-checkpoint",
                "scheduler": ", or copy the folder scheduler of the model that it comes from into it",
            }.get(name, "")
            raise CheckpointError(
                f"{self.source} has no {name.replace('_', ' ')}.",
                why=f"its parts are {', '.join(sorted(self.parts)) or 'none'}.",
                fix=f"Point {self.flag} to a complete pipeline{instead}.",
            )
        return self.parts[name]

    @property
    def shift(self) -> float | None:
        """The schedule's shift that the pipeline was saved with."""
        value = self.scheduler.get("flow_shift", self.scheduler.get("shift"))
        if value is not None and not isinstance(value, (int, float)):
            raise CheckpointError(f"{self.source}: the scheduler's shift is {value!r}.", fix="Download its scheduler again.")
        return None if value is None else float(value)

    @property
    def solver(self) -> str:
        """The solver that the pipeline was saved with, if it is one that we draw the same with; the usual one for none."""
        if not self.scheduler:
            return "unipc"
        name = str(self.scheduler.get("_class_name"))
        if name not in _SCHEDULERS:
            raise CheckpointError(
                f"{self.source} was saved with {name}, which is not supported.",
                fix="Choose a solver with --solver, such as unipc.",
            )
        solver, settings = _SCHEDULERS[name]
        for field_name, usual in settings.items():
            value = self.scheduler.get(field_name, usual)
            if (value or None) != (usual or None):
                raise CheckpointError(
                    f"{self.source} was saved with {field_name} = {value!r} in its scheduler, which is not supported.",
                    why=f"we sample with {usual!r}, and that draws another picture.",
                    fix=f"Say that you want it all the same: --solver {solver}.",
                )
        return solver

    def find_boundary(self, usual: float | None = None) -> float:
        """Return the sigma at which the second expert takes over: the pipeline's own, or ``usual`` for original files.

        Those do not say it. A diffusers pipeline of two experts that does not raises ``CheckpointError``.
        """
        if self.boundary is not None:
            return self.boundary
        if usual is None or (self.folder / "model_index.json").is_file():
            raise CheckpointError(
                f"{self.source} has two experts and does not say at which sigma the second takes over.",
                why="boundary_ratio in its model_index.json is null.",
                fix='Write "boundary_ratio": 0.875 there, or what the model was trained with; Wan 2.2 uses 0.875 or 0.9.',
            )
        return usual

    def choose_solver(self, asked: str) -> str:
        """Return the solver that was asked for, or for 'auto' the pipeline's own, which has to be one of ours."""
        return self.solver if asked == "auto" else asked

    def vae_factors(self) -> tuple[int, int] | None:
        """Return how much the VAE compresses in space and time, from its configuration alone; None where it has none."""
        config = self.parts.get("vae", Path()) / "config.json"
        if "vae" not in self.parts or not config.is_file():
            return None
        values = _read_json(config)
        return int(values.get("scale_factor_spatial") or 8), int(values.get("scale_factor_temporal") or 4)


def find_pipeline(source: str, parts: Collection[str] = (), *, flag: str = "--model") -> Pipeline:
    """Locate a pipeline; ``parts`` are those that the job will read, and all that is fetched from a hub.

    ``flag`` is what messages call it.
    """
    return replace(_find_pipeline(source, parts, flag), flag=flag)


def find_diffusers_pipeline(source: str, parts: Collection[str] = (), *, flag: str = "--model") -> Pipeline:
    """Locate a pipeline in diffusers' form, which trainings read and write; others raise ``UsageError``."""
    path = expand_home(source)
    if source not in _NAMED and path.exists() and not (path / "model_index.json").is_file():
        raise UsageError(
            f"{source} is not a diffusers pipeline.",
            why="it is a single file." if path.is_file() else "it has no model_index.json.",
            fix=f"Point {flag} to the model's diffusers folder or hub id, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers; "
            "wandistiller export writes other files in its form.",
        )
    return find_pipeline(source, parts, flag=flag)


def _find_pipeline(source: str, parts: Collection[str], flag: str) -> Pipeline:
    if source in _NAMED:
        return _read_diffusers_folder(_NAMED[source](), source)
    folder = expand_home(source)
    if folder.is_dir():
        if (folder / "model_index.json").is_file():
            return _read_diffusers_folder(folder, source)
        return _read_original_folder(folder, source)
    if folder.exists():
        raise UsageError(f"{source} is a file, not a pipeline.", fix="Give a single file of weights as --checkpoint.")
    if source in SIZES and not source.startswith("tiny"):
        raise UsageError(
            f"'{source}' is the name of a size, not a checkpoint.",
            fix=f"Point to the folder with its weights, or to its hub id such as {HUB_IDS[source]}.",
        )
    if _HUB_ID.fullmatch(source):
        return _read_diffusers_folder(_download(source, parts, flag), source)
    raise UsageError(
        f"There is no pipeline '{source}'{nearest(source, _NAMED)}",
        why="it is neither a folder here nor a hub id (owner/name).",
        fix="Check the path for a typing error.",
    )


def find_part(source: str, part: str) -> Path:
    """Return where one model lies: ``source`` itself, or that part of the pipeline that it names."""
    path = expand_home(source)
    if source in _NAMED or (path / "model_index.json").is_file() or (not path.exists() and _HUB_ID.fullmatch(source)):
        return find_pipeline(source, {part}).part(part)
    return path


def _read_diffusers_folder(folder: Path, source: str) -> Pipeline:
    index = _read_json(folder / "model_index.json")
    class_name = index.get("_class_name")
    if class_name not in _PIPELINE_CLASSES:
        kind = f"is a {class_name}" if class_name else "does not say what it is in its model_index.json"
        raise CheckpointError(f"{source} {kind}, not a Wan pipeline.", fix=f"Use one of: {', '.join(_PIPELINE_CLASSES)}.")
    scheduler = folder / "scheduler" / "scheduler_config.json"
    listed = [name for name, kind in index.items() if isinstance(kind, list) and kind and kind[0] is not None]
    if "scheduler" in listed and not scheduler.is_file():
        listed.remove("scheduler")
    return Pipeline(
        source=source,
        folder=folder,
        parts={name: folder / name for name in listed if (folder / name).is_dir()},
        boundary=_as_boundary(index.get("boundary_ratio"), source),
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        scheduler=_read_json(scheduler) if scheduler.is_file() else {},
    )


def _as_boundary(value: Any, source: str) -> float | None:
    if value is None or (isinstance(value, float) and 0 < value < 1):
        return value
    raise CheckpointError(
        f"{source}: boundary_ratio in its model_index.json is {value!r}.",
        why="it is the sigma at which the second expert takes over: a number between 0 and 1.",
        fix="Write 0.875 or 0.9, as Wan 2.2 has, or null for a pipeline of one transformer.",
    )


def _read_original_folder(folder: Path, source: str) -> Pipeline:
    """Understand a folder as released by the authors of Wan: transformer at the top, or one folder an expert."""
    parts: dict[str, Path] = {}
    experts = (folder / "high_noise_model", folder / "low_noise_model")
    vaes = sorted(file for file in folder.iterdir() if "vae" in file.name.lower() and file.suffix in (".pth", ".safetensors"))
    if all(expert.is_dir() for expert in experts):
        parts["transformer"], parts["transformer_2"] = experts
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
    return Pipeline(source=source, folder=folder, parts=parts, expand_timesteps=config.get("model_type") == "ti2v")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read.", why=str(error), fix="Copy or download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.", fix="Copy or download it again.")
    return content


def find_description(source: str, *, flag: str = "--model") -> Pipeline | None:
    """Return a pipeline of the hub by its configurations alone, which are fetched; None for others, and where its weights are
    here already."""
    if source in _NAMED or expand_home(source).exists() or not _HUB_ID.fullmatch(source) or is_downloaded(source):
        return None
    return _read_diffusers_folder(_fetch(source, ["model_index.json", "*/config.json", "scheduler/*.json"], flag), source)


def is_downloaded(repo: str) -> bool:
    """Say whether a transformer's weights of a repository of the hub are here already."""
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(repo, "model_index.json")
    return isinstance(index, str) and any(Path(index).parent.glob("transformer*/*.safetensors"))


def _download(repo: str, parts: Collection[str], flag: str) -> Path:
    wanted = ["model_index.json", "scheduler/*.json", f"{ADAPTER_NAME}.*", *FACT_FILES]
    wanted += [pattern.format(part=part) for part in parts for pattern in _HUB_PATTERNS]
    return _fetch(repo, wanted, flag)


def _fetch(repo: str, wanted: list[str], flag: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UsageError(
            f"'{repo}' is neither a folder here nor could it be fetched from the hub.",
            why=str(error).strip().splitlines()[0],
            fix=f"Check the name and the network, or download it elsewhere and point {flag} to the folder.",
        ) from error
