"""A distillation that has been checked: everything found, no weights read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wandistiller.config.distill import DistillConfig
from wandistiller.data.encode_job import plan_buckets
from wandistiller.data.prompts import Prompts, open_prompts
from wandistiller.data.sources import assign_buckets, open_source
from wandistiller.distributed.context import check_clip_groups
from wandistiller.distributed.failures import is_rank
from wandistiller.distributed.parallel import Parallel
from wandistiller.distributed.ranks import read_ranks
from wandistiller.errors import UsageError
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.memory.device_map import check_device_map, read_device_map
from wandistiller.models.derive_student import check_coverage, measure_coverage
from wandistiller.models.expert_pair import inspect_experts
from wandistiller.models.latents import check_channels, check_positions, latent_shape
from wandistiller.models.pipeline import Pipeline, find_diffusers_pipeline
from wandistiller.models.shapes import Shapes
from wandistiller.models.sizes import usual_size
from wandistiller.models.stored import TRANSFORMER, VAE, StoredModel, build_empty, inspect_checkpoint
from wandistiller.models.student_config import StudentPlan, read_student_config
from wandistiller.terminal import say
from wandistiller.train.optimisation import MixedPrecision
from wandistiller.train.optimisers import check_optimiser
from wandistiller.train.runs import choose_precision, prepare_device, prepare_parallel
from wandistiller.train.start_checks import check_sharded_teacher, check_spread_teacher, check_text_to_video
from wandistiller.train.studio import check_drawing

_PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")


@dataclass(frozen=True, kw_only=True)
class DistillJob:
    """What is distilled into what, and on what."""

    config: DistillConfig
    device: torch.device
    parallel: Parallel
    pipeline: Pipeline
    teachers: Sequence[StoredModel]
    vae: StoredModel
    plan: StudentPlan
    sigma: SigmaDistribution
    precision: MixedPrecision
    prompts: Prompts | None
    patch: int
    """What each side of the latents is a multiple of, for the patches of teacher and student."""

    @property
    def teacher_config(self) -> Any:
        return self.teachers[0].config

    @property
    def shapes(self) -> Shapes:
        """The teacher and the VAE without their weights."""
        return Shapes.of(self.vae.config, self.teacher_config, stored_dtype=self.teachers[0].main_dtype())

    @property
    def shift(self) -> float:
        return self.config.sigma_shift or self.pipeline.shift or 1.0

    @property
    def solver(self) -> str:
        return self.pipeline.choose_solver(self.config.solver)

    @property
    def has_adapter(self) -> bool:
        """Whether the student's latents have other channels than the teacher's."""
        return bool(self.plan.config["in_channels"] != self.teacher_config["in_channels"])


def prepare_distillation(config: DistillConfig) -> DistillJob:
    """Find and check every part; raise ``UsageError`` for what cannot be."""
    config.check()
    assert config.teacher_path is not None
    device = prepare_device(config)
    parallel = prepare_parallel(config)
    check_sharded_teacher(config, is_rank=is_rank())
    check_optimiser(config.optimizer_name)
    ranks = read_ranks()
    if device.type == "cuda":
        check_spread_teacher(config, ranks.ranks_here, len(ranks.cards(torch.cuda.device_count())))
    check_clip_groups("--teacher-context-parallel", config.teacher_context_parallel, read_ranks())
    prompts = open_prompts(config.data_path) if config.data_path is not None else None
    pipeline = find_diffusers_pipeline(config.teacher_path, _PARTS, flag="--teacher-path")
    teachers = _find_teachers(config, pipeline)
    vae = inspect_checkpoint(config.vae_checkpoint or pipeline.part("vae"), VAE)
    check_channels(vae.config, teachers[0].config["out_channels"])
    plan = read_student(config, teachers[0].config, vae.config)
    config = with_sizes(config, plan).with_guidance(usual_size(vae.config).guidance)
    check_drawing(config, pipeline)
    shift = config.sigma_shift or pipeline.shift or 1.0
    job = DistillJob(
        config=config,
        device=device,
        parallel=parallel,
        pipeline=pipeline,
        teachers=teachers,
        vae=vae,
        plan=plan,
        sigma=SigmaDistribution(shape=config.sigma_sampling, mean=config.sigma_mean, std=config.sigma_std, shift=shift),
        precision=choose_precision(config, device),
        prompts=prompts,
        patch=common_patch(plan.config, teachers[0].config),
    )
    check_student(config, plan, [teacher.config for teacher in teachers], vae.config)
    if config.noisy_source == "noise" and prompts is not None:
        say("Learning on pure noise, a baseline: sampling asks elsewhere, so expect a good loss and poor pictures")
    return job


def _find_teachers(config: DistillConfig, pipeline: Pipeline) -> list[StoredModel]:
    """Return the teacher's one or two transformers, of a pipeline that can also encode text and says how it is sampled."""
    paths = [pipeline.part("transformer")]
    if "transformer_2" in pipeline.parts:
        paths.append(pipeline.part("transformer_2"))
        pipeline.find_boundary()
    for name in ("text_encoder", "tokenizer", "scheduler"):
        pipeline.part(name)
    teachers = inspect_experts(paths)
    check_text_to_video(teachers[0].config, "distilled")
    if config.teacher_device_map is not None:
        for teacher in teachers:
            check_device_map(read_device_map(config.teacher_device_map), build_empty(TRANSFORMER, teacher.config))
    return teachers


def read_student(config: DistillConfig, teacher: Mapping[str, Any], vae: Mapping[str, Any]) -> StudentPlan:
    """Return what a student is described as, for a teacher and the VAE of its latents."""
    factors = {"spatial_factor": vae["scale_factor_spatial"], "temporal_factor": vae["scale_factor_temporal"]}
    return read_student_config(config.student_config, dict(teacher), **factors)


def common_patch(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> int:
    """Return what each side of the latents is a multiple of, for the patches of teacher and student."""
    return math.lcm(*student["patch_size"][1:], *teacher["patch_size"][1:])


def check_student(
    config: DistillConfig,
    plan: StudentPlan,
    teachers: Sequence[Mapping[str, Any]],
    vae: Mapping[str, Any],
    *,
    has_data: bool = True,
) -> None:
    """Raise ``UsageError`` for a student that cannot learn from its teachers; ``has_data`` says if data can be looked at."""
    teacher = teachers[0]
    if config.feature_weight and tuple(plan.config["patch_size"]) != tuple(teacher["patch_size"]):
        raise UsageError("--feature-weight needs the same tokens in both.", fix="Give the student the teacher's patch size.")
    blocks = ("num_layers", "num_attention_heads", "attention_head_dim")
    if config.feature_weight and any(each[name] != teacher[name] for each in teachers for name in blocks):
        raise UsageError(
            "--feature-weight needs experts of one depth and width.",
            why="the student's blocks are matched with the same blocks of both.",
            fix="Leave it away.",
        )
    if config.feature_weight and config.student_init == "random":
        raise UsageError("--feature-weight needs matched blocks.", fix="Use --student-init teacher.")
    if config.layer_choice != "spread" and plan.layers is not None:
        raise UsageError(
            f"{config.student_config} names its layers, and --layer-choice {config.layer_choice} was given.", fix="Choose one."
        )
    if config.student_init == "teacher" and not config.allow_low_coverage:
        has_adapter = plan.config["in_channels"] != teacher["in_channels"]
        check_coverage(measure_coverage(teacher, plan, has_adapter=has_adapter))
    _check_size(config, plan, teacher, vae, has_data)


def _check_size(
    config: DistillConfig, plan: StudentPlan, teacher: Mapping[str, Any], vae: Mapping[str, Any], has_data: bool
) -> None:
    """Raise ``UsageError`` for a size that does not divide into the patches of teacher and student, or has too many."""
    usual, patch = usual_size(vae), common_patch(plan.config, teacher)
    spatial, theirs, mine = vae["scale_factor_spatial"], teacher["patch_size"], plan.config["patch_size"]
    multiple = spatial * patch
    for flag, pixels in (("--width", config.width or usual.width), ("--height", config.height or usual.height)):
        if pixels % multiple:
            below, above = pixels // multiple * multiple, -(-pixels // multiple) * multiple
            raise UsageError(
                f"{flag} {pixels} does not divide into patches.",
                why=f"those of the teacher are {_sides(theirs)} latents, those of the student {_sides(mine)}, and a latent is "
                f"{spatial} pixels: it must be a multiple of {multiple}.",
                fix=f"Take {flag} {above}{f' or {below}' if below else ''}, or another patch_size for the student.",
            )
        longest = teacher["rope_max_seq_len"] * spatial * min(*theirs[1:], *mine[1:])
        if pixels > longest:
            raise UsageError(f"{flag} {pixels} is more than this teacher has positions for.", fix=f"Give at most {longest}.")
    together, temporal = math.lcm(theirs[0], mine[0]), vae["scale_factor_temporal"]
    buckets = plan_buckets(vae, config.width, config.height, config.frames, config.max_aspect, patch)
    for bucket, model in itertools.product(buckets, (teacher, plan.config)):
        check_positions(model, latent_shape(vae, bucket.shape))
    if has_data and together > 1 and config.dataset_path is not None:
        assigned = assign_buckets(open_source(config.dataset_path, skip_bad=True).source, buckets)
        buckets = [bucket for bucket in assigned.buckets if bucket is not None]
    for count in sorted({bucket.frames for bucket in buckets}):
        latent_frames = (count - 1) // temporal + 1
        if latent_frames % together:
            raise UsageError(
                f"Samples of {count} frames have {latent_frames} in the latents, not a multiple of a patch's {together}.",
                fix=f"Take --frames {(together - 1) * temporal + 1} and no pictures, or a patch_size that begins with 1.",
            )


def _sides(patch: Sequence[int]) -> str:
    return "x".join(map(str, patch[1:]))


def with_sizes(config: DistillConfig, plan: StudentPlan) -> DistillConfig:
    """Take the sizes of the student's description where the flags have none; raise ``UsageError`` where they have others.

    Prompts are all drawn at one size, as one picture where neither says how many frames.
    """
    if plan.image_size is not None:
        height, width = plan.image_size
        if (config.width or width, config.height or height) != (width, height):
            given = f"--width {config.width} --height {config.height}"
            raise _contradiction(config, f"image_size = {[height, width]} (height, width)", given)
        config = replace(config, height=height, width=width)
    if plan.num_frames is not None:
        if set(config.frames) - {plan.num_frames}:
            raise _contradiction(config, f"num_frames = {plan.num_frames}", f"--frames {' '.join(map(str, config.frames))}")
        config = replace(config, frames=(plan.num_frames,))
    if config.data_path is not None:
        config = replace(config, frames=config.frames or (1,), max_aspect=1.0)
    return config


def _contradiction(config: DistillConfig, said: str, given: str) -> UsageError:
    return UsageError(
        f"{config.student_config} says {said}, and {given} was given.",
        why="both say what the student is trained at.",
        fix="Leave the flags away, or change the file.",
    )
