"""A Wan model as it lies on disk: recognised, checked against its architecture, and readable one tensor at a time.

``inspect_checkpoint`` reads headers only. It finds the dialect in the keys (diffusers or original, with or without a
prefix such as ComfyUI's), the configuration in a ``config.json``, in the file's own metadata or else in the shapes, and
refuses what is damaged, incomplete or of another architecture. ``StoredModel.read`` then gives any tensor under its
diffusers name, 8-bit storage multiplied out.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from wandistiller.errors import CheckpointError, shortened
from wandistiller.models import transformer_keys, vae_keys
from wandistiller.models.weight_files import Entry, SafetensorsWeights, Weights, open_weights, scratch

logger = logging.getLogger(__name__)

CONFIG_METADATA_KEY = "wandistiller.config"
"""Where our single files keep the configuration that shapes alone do not tell."""

_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.", "module.", "vae.", "first_stage_model.")
_SCALE_SUFFIXES = (".scale_weight", ".weight_scale")
_QUANTISATION_NOTES = (".comfy_quant", ".scale_input", ".input_scale")
_STORAGE_ONLY_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# What other files are, by a piece of a key that only they have.
_STRANGERS: Mapping[str, str] = {
    "vace_blocks.": "a Wan VACE transformer",
    "motion_encoder.": "a Wan Animate transformer",
    "face_adapter.": "a Wan Animate transformer",
    "casual_audio_encoder.": "a Wan speech-to-video transformer",
    "lora_": "a LoRA, which is applied to a model and is not one itself",
    "double_blocks.": "a Flux or HunyuanVideo transformer",
    "joint_blocks.": "a Stable Diffusion 3 transformer",
    "input_blocks.": "a Stable Diffusion U-Net",
    "transformer_blocks.": "a transformer of another family (CogVideoX, LTX, SD3, Flux)",
    "encoder.block.": "a T5 text encoder",
    "visual.": "a CLIP model",
    "model.layers.": "a language model",
}


@dataclass(frozen=True)
class Architecture:
    """One of the two kinds of Wan model: its class, its dialects, and how to read its configuration from shapes."""

    name: str
    model_class: type[nn.Module]
    original_class_name: str
    is_original: Callable[[Iterable[str]], bool]
    is_diffusers: Callable[[Iterable[str]], bool]

    @property
    def class_names(self) -> tuple[str, str]:
        """What a ``config.json`` calls it, in diffusers and in the original."""
        return self.model_class.__name__, self.original_class_name

    def init_fields(self) -> set[str]:
        return set(inspect.signature(self.model_class.__init__).parameters) - {"self"}

    def original_names(self, config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
        """Return the original name of each diffusers key of a model of this configuration."""
        if self.name == "transformer":
            names = {key: transformer_keys.to_original(key) for key in keys}
        else:
            depth, is_residual = config["num_res_blocks"], config["is_residual"]
            names = {key: vae_keys.to_original(key, depth, is_residual) for key in keys}
        return {key: name for key, name in names.items() if name is not None}


TRANSFORMER = Architecture(
    "transformer", WanTransformer3DModel, "WanModel", transformer_keys.is_original, transformer_keys.is_diffusers
)
VAE = Architecture("vae", AutoencoderKLWan, "WanVAE_", vae_keys.is_original, vae_keys.is_diffusers)


@dataclass(frozen=True)
class StoredModel:
    """A checked checkpoint: every tensor of the model has a stored tensor of the right shape."""

    architecture: Architecture
    config: Mapping[str, Any]
    weights: Weights
    names: Mapping[str, str]
    """Stored name by diffusers name."""
    scales: Mapping[str, str]
    """Stored name of the factor of an 8-bit tensor, by diffusers name."""
    dialect: str

    @property
    def identity(self) -> str:
        """What tells its weights apart from all others."""
        return str(self.weights.path.resolve())

    def read(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one tensor in host memory; None keeps the stored dtype, float32 for what is stored in 8 bits."""
        name, dtype = self.names[key], dtype or self.stored_dtype(key)
        stored = self.weights.entries[name].dtype
        if stored == dtype and key not in self.scales:
            return self.weights.read(name)
        tensor = self.weights.read(name, briefly=True)
        if stored in _STORAGE_ONLY_DTYPES:
            make = torch.empty if dtype == torch.float32 else scratch
            tensor = make(tensor.shape, dtype=torch.float32).copy_(tensor)
            if key in self.scales:
                scale = self.weights.read(self.scales[key]).to(torch.float32)
                tensor *= scale.reshape(-1, *[1] * (tensor.ndim - 1)) if scale.numel() > 1 else scale.reshape(())
        return tensor.to(dtype, memory_format=torch.contiguous_format)

    @property
    def files(self) -> list[Path]:
        """Those that its tensors are in."""
        return sorted({self.weights.entries[name].file for name in self.names.values()})

    @property
    def num_bytes(self) -> int:
        """What the model's tensors take in the files."""
        return sum(self.weights.entries[key].num_bytes for key in self.names.values())

    @property
    def num_parameters(self) -> int:
        """Numbers that the model is made of."""
        return sum(math.prod(self.weights.entries[key].shape) for key in self.names.values())

    def read_for(self, key: str, dtype: torch.dtype | None) -> Tensor:
        """Return one tensor as a model in ``dtype`` has it: in float32 where Wan keeps that; None for what is stored."""
        return self.read(key, torch.float32 if stays_in_float32(self.architecture.model_class, key) else dtype)

    def locate(self, key: str, dtype: torch.dtype | None) -> Entry | None:
        """Return where a tensor's bytes lie as ``read_for`` gives them; None where it has to be converted."""
        if key not in self.names:  # a buffer that the model computes for itself
            return None
        entry = self.weights.entries[self.names[key]]
        wanted = torch.float32 if stays_in_float32(self.architecture.model_class, key) else dtype or entry.dtype
        is_as_used = entry.dtype == wanted and key not in self.scales and isinstance(self.weights, SafetensorsWeights)
        return entry if is_as_used else None

    def stored_dtype(self, key: str) -> torch.dtype:
        """Return the dtype that ``read`` gives when asked for none."""
        dtype = self.weights.entries[self.names[key]].dtype
        return torch.float32 if dtype in _STORAGE_ONLY_DTYPES else dtype

    def main_dtype(self) -> torch.dtype:
        """Return the dtype that most of the bytes are stored in."""
        totals: dict[torch.dtype, int] = {}
        for name in self.names.values():
            entry = self.weights.entries[name]
            totals[entry.dtype] = totals.get(entry.dtype, 0) + entry.num_bytes
        return max(totals, key=lambda dtype: totals[dtype])

    def kept_in_float32(self) -> list[str]:
        """List the tensors that stay in float32 whatever dtype is asked for."""
        return [key for key in self.names if stays_in_float32(self.architecture.model_class, key)]


def inspect_checkpoint(path: Path, expected: Architecture | None = None) -> StoredModel:
    """Recognise and check a checkpoint without reading weights; ``expected`` says which kind it must be."""
    kind = f"a Wan {expected.name}" if expected else "a Wan transformer or VAE"
    _check_class_name(path, kind)
    weights = open_weights(path)
    for architecture in (expected,) if expected else (TRANSFORMER, VAE):
        found = _find_dialect(weights, architecture)
        if found is not None:
            prefix, dialect = found
            return _check(architecture, weights, prefix, dialect)
    raise CheckpointError(
        f"{path} is not {kind}.",
        why=f"it looks like {_describe(weights)}.",
        fix=f"Point to {kind}: a diffusers folder, original Wan files or a ComfyUI single file.",
    )


def build_empty(
    architecture: Architecture,
    config: Mapping[str, Any],
    model_class: type[nn.Module] | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the model on the meta device, except for what is computed rather than loaded.

    With ``dtype`` its tensors have that dtype, but for those that Wan keeps in float32.
    """
    with torch.device("meta"):
        model = (model_class or architecture.model_class)(**config)
    if dtype is not None:
        for name, parameter in model.named_parameters():
            if not stays_in_float32(architecture.model_class, name):
                parameter.data = parameter.data.to(dtype)
    if architecture is TRANSFORMER:
        model.rope = WanRotaryPosEmbed(config["attention_head_dim"], config["patch_size"], config["rope_max_seq_len"])
    return model.eval()


def stays_in_float32(model_class: type[nn.Module], key: str) -> bool:
    """Say whether Wan keeps this tensor in float32 in every precision (diffusers' own rule)."""
    kept = getattr(model_class, "_keep_in_fp32_modules", None) or ()
    return any(module in key.split(".") for module in kept)


def complete_config(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with every field of the model's class, those not given at the class's default."""
    parameters = inspect.signature(architecture.model_class.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
    complete = {**defaults, **{name: value for name, value in config.items() if name in defaults}}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in complete.items()}


def _find_dialect(weights: Weights, architecture: Architecture) -> tuple[str, str] | None:
    for prefix in _PREFIXES:
        keys = {name[len(prefix) :] for name in weights.entries if name.startswith(prefix)}
        if any(part in key for part in ("vace_blocks.", "motion_encoder.", "face_adapter.", "lora_") for key in keys):
            return None
        if architecture.is_original(keys):
            return prefix, "original"
        if architecture.is_diffusers(keys):
            return prefix, "diffusers"
    return None


def _check(architecture: Architecture, weights: Weights, prefix: str, dialect: str) -> StoredModel:
    stored = {
        name[len(prefix) :]: name
        for name in weights.entries
        if name.startswith(prefix) and name != f"{prefix}scaled_fp8" and not name.endswith(_QUANTISATION_NOTES)
    }
    scales = {}
    for key in list(stored):
        for suffix in _SCALE_SUFFIXES:
            if key.endswith(suffix):
                scales[key.removesuffix(suffix) + ".weight"] = stored.pop(key)
    config = complete_config(architecture, _find_config(architecture, weights, stored, dialect))
    expected = _expected_tensors(architecture, config, weights.path)
    renamed = architecture.original_names(config, expected) if dialect == "original" else {key: key for key in expected}
    _check_keys(weights, prefix, stored, renamed)
    names = {key: stored[name] for key, name in renamed.items()}
    wrong = [
        f"{name} is {list(weights.entries[name].shape)}, not {list(expected[key].shape)}"
        for key, name in names.items()
        if weights.entries[name].shape != tuple(expected[key].shape)
    ]
    if wrong:
        raise CheckpointError(
            f"{weights.path} has {len(wrong)} tensors of the wrong shape: {shortened(wrong, 3)}.",
            why="its config.json may belong to another model.",
            fix="Use the config.json that came with these weights, or remove it to have the shapes read.",
        )
    found = StoredModel(
        architecture=architecture,
        config=config,
        weights=weights,
        names=names,
        scales={key: scales[name] for key, name in renamed.items() if name in scales},
        dialect=dialect,
    )
    _check_storage(found, set(scales) - set(renamed.values()))
    return found


def _expected_tensors(architecture: Architecture, config: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the tensors that a model of this configuration has, on the meta device."""
    try:
        expected = build_empty(architecture, config).state_dict()
    except (TypeError, ValueError, ArithmeticError, RuntimeError, IndexError, AssertionError) as error:
        raise CheckpointError(
            f"{path}: its configuration describes no model.",
            why=f"{type(error).__name__}: {error}",
            fix="Use the config.json that came with these weights.",
        ) from error
    if not isinstance(config.get("eps", 0.0), (int, float)):
        raise CheckpointError(f"{path}: eps is {config['eps']!r}, not a number.", fix="Use the config.json of these weights.")
    if architecture is VAE:
        for name in ("latents_mean", "latents_std"):
            if len(config[name]) != config["z_dim"]:
                raise CheckpointError(
                    f"{path}: {name} has {len(config[name])} values for {config['z_dim']} latent channels.",
                    fix="Use the config.json that came with these weights.",
                )
    return dict(expected)


def _check_storage(stored: StoredModel, orphans: set[str]) -> None:
    """Raise ``CheckpointError`` where a tensor is stored in a way that no weight is."""
    if orphans:
        raise CheckpointError(
            f"{stored.weights.path} has factors for weights that are not there: {shortened(sorted(orphans))}.",
            fix="Download the file again.",
        )
    for key, name in stored.names.items():
        entry = stored.weights.entries[name]
        is_weight = entry.dtype.is_floating_point or (entry.dtype is torch.int8 and key in stored.scales)
        if not is_weight:
            raise CheckpointError(
                f"{stored.weights.path} stores '{name}' as {str(entry.dtype).removeprefix('torch.')}.",
                why="weights are floating-point numbers, or int8 with a factor.",
                fix="Get a version in bfloat16, float16, float32 or scaled 8 bits.",
            )
        scale = stored.weights.entries[stored.scales[key]].shape if key in stored.scales else ()
        if scale and scale not in ((1,), (entry.shape[0],), (entry.shape[0], 1), (1, 1)):
            raise CheckpointError(
                f"{stored.weights.path}: the factor of '{name}' has shape {list(scale)} for a weight of {list(entry.shape)}.",
                why="one factor a tensor or one a row is supported.",
                fix="Get a version in another storage.",
            )


def _check_keys(weights: Weights, prefix: str, stored: Mapping[str, str], renamed: Mapping[str, str]) -> None:
    missing = sorted(set(renamed.values()) - set(stored))
    # Some image-to-video checkpoints carry a norm that no implementation uses; diffusers ignores it too.
    unexpected = sorted(key for key in set(stored) - set(renamed.values()) if "norm_added_q" not in key)
    if missing:
        raise CheckpointError(
            f"{weights.path} lacks {len(missing)} tensors: {shortened(prefix + key for key in missing)}.",
            why="a shard may be missing, or its config.json may describe a larger model.",
            fix="Download all files of the checkpoint again.",
        )
    if unexpected:
        raise CheckpointError(
            f"{weights.path} has {len(unexpected)} tensors that the model does not: "
            f"{shortened(prefix + key for key in unexpected)}.",
            why="it belongs to a variant of Wan with more parts, or its config.json describes a smaller model.",
            fix="Point to a text-to-video or image-to-video checkpoint and its own config.json.",
        )


def _find_config(architecture: Architecture, weights: Weights, stored: Mapping[str, str], dialect: str) -> dict[str, Any]:
    beside = _config_beside(architecture, weights.path)
    if beside is None and CONFIG_METADATA_KEY in weights.metadata:
        beside = _config_in_metadata(weights)
    if beside is not None and beside.get("_class_name") != architecture.original_class_name:
        unknown = sorted(key for key in beside if not key.startswith("_") and key not in architecture.init_fields())
        if unknown:
            logger.warning("%s: config.json has fields that this model does not know: %s", weights.path, shortened(unknown))
        return beside
    shapes = {key: weights.entries[name].shape for key, name in stored.items()}
    try:
        if architecture is VAE:
            return vae_keys.infer_config(shapes, str(weights.path))
        if dialect == "original":
            shapes = {transformer_keys.to_diffusers(key) or key: shape for key, shape in shapes.items()}
        heads = transformer_keys.config_from_original(beside) if beside else {}
        return transformer_keys.infer_config(shapes, str(weights.path), heads)
    except (KeyError, IndexError, ValueError, StopIteration, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{weights.path} lacks tensors that tell what model it is.",
            why=f"there is no usable {error}." if isinstance(error, KeyError) else f"{type(error).__name__}: {error}",
            fix="Download all files of the checkpoint again, or put its config.json beside it.",
        ) from error


def _config_in_metadata(weights: Weights) -> dict[str, Any]:
    try:
        config = json.loads(weights.metadata[CONFIG_METADATA_KEY])
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise CheckpointError(f"{weights.path} has a damaged configuration in its header.", fix="Download the file again.")
    return config


def _config_beside(architecture: Architecture, path: Path) -> dict[str, Any] | None:
    """Return the ``config.json`` next to the weights if it describes this kind of model."""
    config = _read_config(path)
    return config if config is not None and config.get("_class_name") in architecture.class_names else None


def _check_class_name(path: Path, kind: str) -> None:
    """Raise ``CheckpointError`` for a folder that says it is a model of another family, whatever its weights look like."""
    name = (_read_config(path) or {}).get("_class_name") if path.is_dir() else None
    if name is not None and name not in (*TRANSFORMER.class_names, *VAE.class_names):
        raise CheckpointError(
            f"{path} is a {name}, not {kind}.",
            why="its config.json says so.",
            fix="Use a text-to-video or image-to-video checkpoint of Wan, with its own config.json.",
        )


def _read_config(path: Path) -> dict[str, Any] | None:
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON.", why=str(error), fix="Copy or download it again.") from error
    return config if isinstance(config, dict) else None


def _describe(weights: Weights) -> str:
    for architecture in (TRANSFORMER, VAE):
        if _find_dialect(weights, architecture):
            return f"a Wan {architecture.name}"
    for part, description in _STRANGERS.items():
        if any(part in name for name in weights.entries):
            return description
    return f"something else, with keys such as {shortened(weights.entries, 3)}" if weights.entries else "an empty file"
