"""What student a distillation makes: read from a JSON or TOML file, completed from the teacher's configuration, checked.

A file names fields as diffusers' ``WanTransformer3DModel`` does, or as people describe transformers (``hidden_size``,
``depth``, ``num_heads``, ``mlp_ratio``, ``image_size``, ...), and may mix both. What it does not say is as in the teacher. All
of this needs configurations alone: a student that cannot be is refused before any weights are read.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from wandistiller.config.values import without_repeats
from wandistiller.errors import UsageError, nearest
from wandistiller.models.stored import TRANSFORMER, build_empty, complete_config
from wandistiller.models.text_padding import TEXT_TOKENS

# Other names of diffusers' fields.
_SYNONYMS: Mapping[str, str] = {
    "depth": "num_layers",
    "num_heads": "num_attention_heads",
    "text_encoder_output_dim": "text_dim",
    "num_channels": "latent_channels",
}
# Fields that diffusers does not have; what they mean is worked out below.
_DESCRIBED = ("hidden_size", "mlp_ratio", "latent_channels", "image_size", "num_frames", "text_max_length", "layers")
# Of other programs, or for people: nothing of the student depends on them.
_INFORMATIONAL = ("model_type", "name", "description", "comment", "projection_factor")
_POSITIVE = (
    "num_layers num_attention_heads attention_head_dim in_channels out_channels text_dim freq_dim ffn_dim rope_max_seq_len "
    "hidden_size latent_channels num_frames text_max_length"
).split()
_SMALLEST_HEAD = 6  # one pair of channels for each of the rotary embedding's three axes


@dataclass(frozen=True, kw_only=True)
class StudentPlan:
    """A student that can be made of its teacher, before any weights are read."""

    config: Mapping[str, Any]
    """The complete configuration of the student's diffusers model."""
    layers: tuple[int, ...] | None = None
    """The teacher's layers that the student's start from, in order; None until they are chosen."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to train and sample at; None leaves it to the job."""
    num_frames: int | None = None
    """Frames to train and sample at, 1 for an image-only student; None leaves it to the job."""
    text_max_length: int = TEXT_TOKENS
    """Tokens of a caption that are used; the rest is cut off."""

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return int(self.config["num_attention_heads"] * self.config["attention_head_dim"])

    def num_parameters(self) -> int:
        """Return how many parameters the student has, from its shapes alone."""
        return sum(parameter.numel() for parameter in build_empty(TRANSFORMER, self.config).parameters())

    def with_layers(self, layers: Sequence[int]) -> StudentPlan:
        """Return the plan with its layers chosen."""
        if len(layers) != self.config["num_layers"]:
            raise ValueError(f"{len(layers)} layers chosen for a student of {self.config['num_layers']}")
        return replace(self, layers=tuple(layers))


def read_student_config(
    path: Path | None, teacher: Mapping[str, Any], *, spatial_factor: int = 8, temporal_factor: int = 4
) -> StudentPlan:
    """Return the student that a file describes, or one of half the teacher's depth for None.

    ``teacher`` is the configuration of its ``WanTransformer3DModel``; the factors are how much its VAE compresses. Raises
    ``UsageError`` for what makes no sense.
    """
    teacher = complete_config(TRANSFORMER, teacher)
    teacher["out_channels"] = teacher["out_channels"] or teacher["in_channels"]
    if path is None:
        return StudentPlan(config={**teacher, "num_layers": max(1, teacher["num_layers"] // 2)})
    values = _read_values(path)
    config = {**teacher, **{name: value for name, value in values.items() if name in teacher}}
    layers = _find_layers(values, config, teacher, path)
    _find_channels(values, config, teacher, path)
    _find_width(values, config, teacher, path)
    _find_ffn(values, config, path)
    config["patch_size"] = _as_patch(config["patch_size"], path)
    _check_against_teacher(config, teacher, path)
    plan = StudentPlan(
        config=config,
        layers=layers,
        image_size=_as_pair(values["image_size"], path) if "image_size" in values else None,
        num_frames=values.get("num_frames"),
        text_max_length=values.get("text_max_length", TEXT_TOKENS),
    )
    _check_sizes(plan, spatial_factor, temporal_factor, path)
    return plan


def _read_values(path: Path) -> dict[str, Any]:
    """Return the file's values, each under one name."""
    read_json = partial(json.loads, object_pairs_hook=without_repeats)
    readers: dict[str, Callable[[str], Any]] = {".json": read_json, ".toml": tomllib.loads}
    if path.suffix.lower() not in readers:
        raise UsageError(f"{path} is neither a .json nor a .toml file.", fix="Describe the student in one of these formats.")
    try:
        content = readers[path.suffix.lower()](path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read.", why=str(error), fix="Check the path and the syntax.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not an object with named values.", fix='Write for instance {"depth": 16}.')
    known = {*TRANSFORMER.init_fields(), *_SYNONYMS, *_DESCRIBED, *_INFORMATIONAL}
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in _INFORMATIONAL or name.startswith("_"):
            continue
        if name not in known:
            raise UsageError(
                f"{path}: a student has no '{key}'{nearest(name, known)}",
                fix=f"Use names such as {', '.join(_DESCRIBED)}, or those of diffusers' WanTransformer3DModel.",
            )
        name = _SYNONYMS.get(name, name)
        if name in values and values[name] != value:
            raise _contradiction(path, f"{said[name]} = {values[name]}", f"{key} = {value}")
        values[name], said[name] = value, key
    _check_types(values, said, path)
    return values


def _check_types(values: Mapping[str, Any], said: Mapping[str, str], path: Path) -> None:
    """Check each value by itself; ``said`` is what the file calls it."""
    for name in _POSITIVE:
        if name in values and (not _is_int(values[name]) or values[name] < 1):
            raise UsageError(f"{path}: {said[name]} is {values[name]!r}.", fix="Give a whole number from 1 on.")
    for name in ("mlp_ratio", "eps"):
        value = values.get(name, 1.0)
        if not _is_number(value) or not 0 < value < math.inf:
            raise UsageError(f"{path}: {name} is {value!r}.", fix="Give a positive number.")
    if values.get("text_max_length", 1) > TEXT_TOKENS:
        raise UsageError(
            f"{path}: text_max_length is {values['text_max_length']}.",
            why=f"Wan sees captions of at most {TEXT_TOKENS} tokens.",
            fix=f"Give at most {TEXT_TOKENS}.",
        )


def _find_layers(
    values: Mapping[str, Any], config: dict[str, Any], teacher: Mapping[str, Any], path: Path
) -> tuple[int, ...] | None:
    total = teacher["num_layers"]
    layers = values.get("layers")
    if layers is not None:
        if not isinstance(layers, list) or not layers or not all(_is_int(layer) and 0 <= layer < total for layer in layers):
            raise UsageError(
                f"{path}: layers is {layers!r}.",
                why=f"the teacher's layers count from 0 to {total - 1}.",
                fix=f"List those to start from, such as [0, {total - 1}].",
            )
        if layers != sorted(set(layers)):
            raise UsageError(
                f"{path}: layers {layers} are not in ascending order.",
                why="a layer works on what those before it give, so each is used once and in the teacher's order.",
                fix=f"Write {sorted(set(layers))}.",
            )
        if values.get("num_layers", len(layers)) != len(layers):
            raise _contradiction(path, f"a depth of {values['num_layers']}", f"{len(layers)} layers")
        config["num_layers"] = len(layers)
    if config["num_layers"] > total:
        raise UsageError(
            f"{path}: the student has {config['num_layers']} layers, its teacher {total}.",
            why="a student starts from layers of its teacher.",
            fix=f"Give a depth of at most {total}.",
        )
    return None if layers is None else tuple(layers)


def _find_channels(values: Mapping[str, Any], config: dict[str, Any], teacher: Mapping[str, Any], path: Path) -> None:
    """Let what is said of the latents' channels hold for both ends: velocities have the channels of latents."""
    names = [name for name in ("latent_channels", "in_channels", "out_channels") if name in values]
    if teacher["in_channels"] != teacher["out_channels"]:
        wanted = (values.get("in_channels", teacher["in_channels"]), values.get("out_channels", teacher["out_channels"]))
        latents = values.get("latent_channels", teacher["out_channels"])
        if wanted != (teacher["in_channels"], teacher["out_channels"]) or latents != teacher["out_channels"]:
            raise UsageError(
                f"{path}: the student has other channels than its teacher.",
                why=f"the teacher sees a condition beside the latents ({teacher['in_channels']} channels for "
                f"{teacher['out_channels']}), and a channel adapter maps latents only.",
                fix=f"Leave out {', '.join(names)}.",
            )
        return
    for name in names:
        if values[name] != values[names[0]]:
            raise _contradiction(path, f"{names[0]} = {values[names[0]]}", f"{name} = {values[name]}")
    if names:
        config["in_channels"] = config["out_channels"] = values[names[0]]


def _find_width(values: Mapping[str, Any], config: dict[str, Any], teacher: Mapping[str, Any], path: Path) -> None:
    """Work out heads and their size: what is said, then the teacher's size of heads, then its number of them."""
    width, heads, size = (values.get(name) for name in ("hidden_size", "num_attention_heads", "attention_head_dim"))
    if width is not None:
        _check_at_most("a width (hidden_size)", width, _width(teacher), path)
        if heads is not None and size is not None and heads * size != width:
            raise _contradiction(path, f"hidden_size = {width}", f"{heads} heads of {size}, which make {heads * size}")
        unit = heads or size or teacher["attention_head_dim"]
        if width % unit:
            step, least = (2 * heads, heads * _SMALLEST_HEAD) if heads else (unit, unit)
            most = _width(teacher) // step * step
            near = min(max(_near_multiple(width, step), least), most)
            advice = [f"a multiple, such as {near}"] if least <= most else []
            advice += [f"another number of heads, such as {_near_divisor(width, heads)}"] if heads else []
            raise UsageError(
                f"{path}: hidden_size = {width} does not divide into {f'{heads} heads' if heads else f'heads of {unit}'}.",
                why="the width is the number of heads times the channels of each.",
                fix=f"Choose {', or '.join(advice or ['smaller heads'])}.",
            )
        heads = heads or width // unit
        config["num_attention_heads"], config["attention_head_dim"] = heads, width // heads
    size = config["attention_head_dim"]
    if size % 2 or size < _SMALLEST_HEAD:
        raise UsageError(
            f"{path}: the student's heads have {size} channels.",
            why="positions in time, height and width turn pairs of them: an even number, "
            f"at least {_SMALLEST_HEAD}, is needed.",
            fix=f"Choose heads of {max(_SMALLEST_HEAD, size + size % 2)}, or fewer heads.",
        )
    # What image embeddings are mapped to has the model's own width in every released Wan.
    if "added_kv_proj_dim" not in values and teacher["added_kv_proj_dim"] == _width(teacher):
        config["added_kv_proj_dim"] = _width(config)


def _find_ffn(values: Mapping[str, Any], config: dict[str, Any], path: Path) -> None:
    if "mlp_ratio" not in values:
        return
    hidden = values["mlp_ratio"] * _width(config)
    if abs(hidden - round(hidden)) > 1e-3 or round(hidden) < 1:
        raise UsageError(
            f"{path}: mlp_ratio = {values['mlp_ratio']} of a width of {_width(config)} makes {hidden:g} hidden units.",
            fix=f"Give ffn_dim = {max(1, round(hidden))} instead.",
        )
    if values.get("ffn_dim", round(hidden)) != round(hidden):
        ratio = f"mlp_ratio = {values['mlp_ratio']}, which makes {round(hidden)} units"
        raise _contradiction(path, ratio, f"ffn_dim = {values['ffn_dim']}")
    config["ffn_dim"] = round(hidden)


def _check_against_teacher(config: Mapping[str, Any], teacher: Mapping[str, Any], path: Path) -> None:
    for what, ours, theirs in (
        ("a width (hidden_size)", _width(config), _width(teacher)),
        ("ffn_dim", config["ffn_dim"], teacher["ffn_dim"]),
        ("freq_dim", config["freq_dim"], teacher["freq_dim"]),
    ):
        _check_at_most(what, ours, theirs, path)
    if config["freq_dim"] % 2:
        raise UsageError(f"{path}: freq_dim is {config['freq_dim']}.", why="it counts sines and cosines.", fix="Make it even.")
    for name in ("text_dim", "image_dim", "pos_embed_seq_len", "rope_max_seq_len", "qk_norm", "cross_attn_norm"):
        if config[name] != teacher[name]:
            raise UsageError(
                f"{path}: {name} is {config[name]!r}, the teacher's {teacher[name]!r}.",
                why="student and teacher see the same text and image embeddings, and are built of the same parts.",
                fix=f"Leave {name} out.",
            )
    expected = _width(config) if teacher["added_kv_proj_dim"] == _width(teacher) else teacher["added_kv_proj_dim"]
    if config["added_kv_proj_dim"] != expected:
        raise UsageError(
            f"{path}: added_kv_proj_dim is {config['added_kv_proj_dim']!r}, where this student needs {expected!r}.",
            fix="Leave added_kv_proj_dim out.",
        )


def _check_at_most(what: str, ours: int, theirs: int, path: Path) -> None:
    if ours > theirs:
        raise UsageError(
            f"{path}: the student has {what} of {ours}, its teacher of {theirs}.",
            why="a student is cut out of its teacher.",
            fix=f"Give at most {theirs}, or take a larger teacher.",
        )


def _check_sizes(plan: StudentPlan, spatial_factor: int, temporal_factor: int, path: Path) -> None:
    frames, height, width = plan.config["patch_size"]
    for side, pixels, patch in zip(("height", "width"), plan.image_size or (), (height, width), strict=False):
        step = spatial_factor * patch
        if pixels % step:
            raise UsageError(
                f"{path}: an image {side} of {pixels} pixels does not divide into patches of {patch}.",
                why=f"the VAE compresses {spatial_factor} times, so a patch covers {step} pixels.",
                fix=f"Choose {_near_multiple(pixels, step)} pixels, or another patch_size.",
            )
    if plan.num_frames is None:
        return
    latent_frames, rest = divmod(plan.num_frames - 1, temporal_factor)
    if rest:
        raise UsageError(
            f"{path}: num_frames is {plan.num_frames}.",
            why=f"the VAE makes one frame of the first and one of every {temporal_factor} after it.",
            fix=f"Choose {latent_frames * temporal_factor + 1} or {(latent_frames + 1) * temporal_factor + 1}.",
        )
    if (latent_frames + 1) % frames:
        raise UsageError(
            f"{path}: {plan.num_frames} frames are {latent_frames + 1} in the latents, "
            f"which do not divide into patches of {frames}.",
            fix="Choose another number of frames, or a patch_size that begins with 1.",
        )


def _as_patch(value: Any, path: Path) -> list[int]:
    sizes = [1, value, value] if _is_int(value) else value
    if not isinstance(sizes, list | tuple) or len(sizes) != 3 or not all(_is_int(size) and size > 0 for size in sizes):
        raise UsageError(
            f"{path}: patch_size is {value!r}.",
            why="a patch has a number of frames, a height and a width, in latents.",
            fix="Give one number p for [1, p, p], or all three.",
        )
    return list(sizes)


def _as_pair(value: Any, path: Path) -> tuple[int, int]:
    sizes = [value, value] if _is_int(value) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(_is_int(size) and size > 0 for size in sizes):
        raise UsageError(f"{path}: image_size is {value!r}.", fix="Give one number of pixels, or [height, width].")
    return sizes[0], sizes[1]


def _contradiction(path: Path, first: str, second: str) -> UsageError:
    return UsageError(f"{path} says {first} and also {second}.", why="both mean the same thing.", fix="Keep one of them.")


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def _near_multiple(value: int, step: int) -> int:
    return max(step, round(value / step) * step)


def _near_divisor(value: int, wanted: int) -> int:
    """Return the number of heads closest to the wanted one that gives heads of an allowed size; tries every one."""
    sizes = {heads: value // heads for heads in range(1, value + 1) if value % heads == 0}
    fitting = [heads for heads, size in sizes.items() if size % 2 == 0 and size >= _SMALLEST_HEAD]
    return min(fitting or [1], key=lambda heads: abs(heads - wanted))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
