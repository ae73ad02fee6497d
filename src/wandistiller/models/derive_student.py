"""A student with its teacher's weights: some of the layers, and of each some of the heads, channels and units.

The teacher is read one tensor at a time, so host memory holds the student and one tensor more; choosing by importance reads
it twice. What cannot be taken from the teacher begins as PyTorch initialises it, and is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models.channel_adapter import ChannelAdapter
from wandistiller.models.load import set_tensor
from wandistiller.models.stored import TRANSFORMER, build_empty, complete_config
from wandistiller.models.student_config import StudentPlan
from wandistiller.models.student_layers import rank_layers, spread_layers
from wandistiller.models.student_slices import Read, choose_indices, head_channels, take

LOW_COVERAGE = 0.5

_GROUPS = ("embeddings", "attention", "ffn", "modulation", "head")


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How many of a student's parameters come from its teacher, by group."""

    carried: Mapping[str, int]
    total: Mapping[str, int]

    @property
    def fraction(self) -> float:
        return sum(self.carried.values()) / sum(self.total.values())

    def new_groups(self) -> list[str]:
        """List the groups of which at least some begins anew."""
        return [group for group in self.total if self.carried[group] < self.total[group]]

    def new_parts(self) -> list[str]:
        """Say of each such group how much of it begins anew."""
        groups = self.new_groups()
        return [f"{group} ({_percent(self.total[group] - self.carried[group], self.total[group])})" for group in groups]

    def as_json(self) -> dict[str, dict[str, int]]:
        """Return the table: of each group what comes from the teacher, and all."""
        return {group: {"carried": self.carried[group], "total": total} for group, total in self.total.items()}


@dataclass(frozen=True, kw_only=True)
class DerivedStudent:
    """A student, ready to be trained, and where it comes from."""

    model: WanTransformer3DModel
    plan: StudentPlan
    """What was asked for, with the layers that were chosen."""
    coverage: Coverage
    channels: Tensor | None = None
    """Which of the teacher's channels the student's residual stream has; None for all."""


def derive_student(
    read: Read,
    teacher_config: Mapping[str, Any],
    plan: StudentPlan,
    *,
    layer_scores: Sequence[float] | None = None,
    choice: str = "importance",
    adapter: ChannelAdapter | None = None,
    allow_low_coverage: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> DerivedStudent:
    """Return the planned student on the host, initialised from the teacher.

    ``read`` gives a tensor of the teacher under its diffusers name, such as ``StoredModel.read``. Layers are the plan's, else
    those of the highest ``layer_scores``, else evenly spread. ``choice`` says how heads, channels and units are chosen, see
    ``student_slices.CHOICES``. With ``adapter``, a student of other latent channels keeps the ends of its teacher, seen
    through the adapter. ``seed`` is for what begins anew. Raises ``UsageError``, before anything is read, if less than half of
    the student would come from the teacher, unless that is allowed.
    """
    teacher = complete_config(TRANSFORMER, teacher_config)
    plan = _with_chosen_layers(plan, teacher, layer_scores)
    _check_adapter(adapter, teacher, plan)
    has_adapter = adapter is not None
    coverage = measure_coverage(teacher, plan, has_adapter=has_adapter)
    if not allow_low_coverage:
        check_coverage(coverage)
    model = build_empty(TRANSFORMER, plan.config, dtype=dtype)
    is_new = _newness(teacher, plan.config, has_adapter)
    sources = {key: _teacher_key(key, plan) for key, _ in model.named_parameters() if not is_new(key)}
    with torch.no_grad():
        indices = choose_indices(read, sources.values(), teacher, plan.config, choice)
        for key, source in sources.items():
            value = take(read(source), source, indices)
            if adapter is not None:
                value = _see_through(adapter, key, value)
            parameter = model.get_parameter(key)
            if value.shape != parameter.shape:
                raise CheckpointError(
                    f"The teacher's '{source}' gives {list(value.shape)} for the student's {list(parameter.shape)}.",
                    why="its weights do not belong to its configuration.",
                    fix="Use the config.json that came with the teacher's weights.",
                )
            set_tensor(model, key, value.to(parameter.dtype, copy=True))
        _initialise(model, is_new, seed)
    return DerivedStudent(model=model, plan=plan, coverage=coverage, channels=indices.get("residual"))


def measure_coverage(teacher_config: Mapping[str, Any], plan: StudentPlan, *, has_adapter: bool = False) -> Coverage:
    """Return how much of the student will come from the teacher, from the configurations alone."""
    is_new = _newness(complete_config(TRANSFORMER, teacher_config), plan.config, has_adapter)
    carried, total = dict.fromkeys(_GROUPS, 0), dict.fromkeys(_GROUPS, 0)
    for key, parameter in build_empty(TRANSFORMER, plan.config).named_parameters():
        total[_group(key)] += parameter.numel()
        carried[_group(key)] += 0 if is_new(key) else parameter.numel()
    return Coverage(carried=carried, total=total)


def check_coverage(coverage: Coverage) -> None:
    """Raise ``UsageError`` if less than half of the student would come from its teacher."""
    if coverage.fraction >= LOW_COVERAGE:
        return
    raise UsageError(
        f"Only {100 * coverage.fraction:.1f} % of the student's parameters would come from its teacher.",
        why=f"these begin anew: {', '.join(coverage.new_parts())}. Latent channels or patches other than the teacher's make "
        "new ends; more heads, or larger ones, make new attention.",
        fix="Choose a student that is cut out of its teacher, or train it nearly from scratch with --allow-low-coverage.",
    )


def _with_chosen_layers(plan: StudentPlan, teacher: Mapping[str, Any], scores: Sequence[float] | None) -> StudentPlan:
    if plan.layers is not None:
        return plan
    total, count = teacher["num_layers"], plan.config["num_layers"]
    if scores is not None and len(scores) != total:
        raise ValueError(f"{len(scores)} scores for {total} layers of the teacher")
    return plan.with_layers(spread_layers(total, count) if scores is None else rank_layers(scores, count))


def _check_adapter(adapter: ChannelAdapter | None, teacher: Mapping[str, Any], plan: StudentPlan) -> None:
    if adapter is None:
        return
    ours, theirs = (adapter.teacher_channels, adapter.student_channels), (teacher["in_channels"], plan.config["in_channels"])
    if ours != theirs:
        raise UsageError(
            f"The channel adapter maps {ours[0]} channels to {ours[1]}; teacher and student have {theirs[0]} and {theirs[1]}.",
            fix="Make an adapter for these two.",
        )


def _newness(teacher: Mapping[str, Any], student: Mapping[str, Any], has_adapter: bool) -> Callable[[str], bool]:
    """Return what says whether a tensor of the student cannot be taken from its teacher."""
    ends = ("in_channels", "out_channels")
    has_new_ends = list(student["patch_size"]) != list(teacher["patch_size"]) or (
        not has_adapter and any(student[name] != teacher[name] for name in ends)
    )
    has_new_attention = (
        student["num_attention_heads"] > teacher["num_attention_heads"]
        or head_channels(teacher["attention_head_dim"], student["attention_head_dim"]) is None
    )

    def is_new(key: str) -> bool:
        is_end = key.startswith(("patch_embedding.", "proj_out."))
        return (has_new_ends and is_end) or (has_new_attention and _group(key) == "attention")

    return is_new


def _see_through(adapter: ChannelAdapter, key: str, value: Tensor) -> Tensor:
    """Return a tensor of one of the model's ends for latents that went through the adapter.

    Noise goes through its matrix alone, and sampling starts from noise: the adapter's mean and std are left to training.
    """
    matrix = adapter.matrix.to(value.device)
    if key == "patch_embedding.weight":
        return torch.einsum("sc,ocfhw->osfhw", matrix, value.float())
    if key.startswith("proj_out."):  # of a patch's values, channels run fastest
        by_channel = value.float().unflatten(0, (-1, adapter.teacher_channels))
        return torch.einsum("sc,pc...->ps...", matrix, by_channel).flatten(0, 1)
    return value


def _initialise(model: nn.Module, is_new: Callable[[str], bool], seed: int) -> None:
    """Give what does not come from the teacher PyTorch's own initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in _modules_of(model, is_new):
            module.to_empty(device="cpu").reset_parameters()


def _modules_of(model: nn.Module, is_new: Callable[[str], bool]) -> Iterator[Any]:
    for name in dict.fromkeys(key.rpartition(".")[0] for key, _ in model.named_parameters() if is_new(key)):
        yield model.get_submodule(name)


def _teacher_key(key: str, plan: StudentPlan) -> str:
    layers = plan.layers or ()
    return re.sub(r"^blocks\.(\d+)\.", lambda match: f"blocks.{layers[int(match.group(1))]}.", key)


def _group(key: str) -> str:
    if key.startswith(("patch_embedding.", "condition_embedder.")):
        return "embeddings"
    if not key.startswith("blocks."):
        return "head"
    part = key.split(".")[2]
    return "attention" if part in ("attn1", "attn2") else "ffn" if part == "ffn" else "modulation"


def _percent(carried: int, total: int) -> str:
    return f"{100 * carried / total:.1f} %" if total else "none"
