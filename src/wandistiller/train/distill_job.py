"""A distillation that has been checked: everything found, no weights read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wandistiller.config.distill import DistillConfig
from wandistiller.data.prompts import Prompts, open_prompts
from wandistiller.distributed.context import check_clip_groups
from wandistiller.distributed.failures import is_rank
from wandistiller.distributed.parallel import Parallel
from wandistiller.distributed.ranks import Ranks, read_ranks
from wandistiller.errors import UsageError
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.models.pipeline import Pipeline, find_pipeline
from wandistiller.models.stored import TRANSFORMER, VAE, StoredModel, inspect_checkpoint
from wandistiller.models.student_config import StudentPlan, read_student_config
from wandistiller.terminal import say
from wandistiller.train.optimisation import MixedPrecision
from wandistiller.train.runs import choose_precision, prepare_device, prepare_parallel
from wandistiller.train.start_checks import check_text_to_video

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

    @property
    def teacher_config(self) -> Any:
        return self.teachers[0].config

    @property
    def shift(self) -> float:
        return self.config.sigma_shift or self.pipeline.shift or 1.0


def prepare_distillation(config: DistillConfig) -> DistillJob:
    """Find and check every part; raise ``UsageError`` for what cannot be."""
    config.check()
    assert config.teacher_path is not None
    device = prepare_device(config)
    parallel = prepare_parallel(config)
    if config.strategy == "sharded" and not is_rank():
        raise UsageError(
            "--teacher-device-strategy sharded was given, but torchrun did not start this.",
            why="each of several processes keeps a slice of the teacher.",
            fix="Start it with torchrun, or let the teacher be streamed with --teacher-device-strategy offload.",
        )
    _check_cards(config, device, read_ranks())
    check_clip_groups("--teacher-context-parallel", config.teacher_context_parallel, read_ranks())
    prompts = open_prompts(config.data_path) if config.data_path is not None else None
    pipeline = find_pipeline(config.teacher_path, _PARTS)
    if not (pipeline.folder / "model_index.json").is_file():
        raise UsageError(f"{config.teacher_path} is not a diffusers pipeline.", fix="Convert it with wandistiller export.")
    names = [name for name in ("transformer", "transformer_2") if name in pipeline.parts]
    teachers = [inspect_checkpoint(pipeline.part(name), TRANSFORMER) for name in names]
    check_text_to_video(teachers[0].config, "distilled")
    vae = inspect_checkpoint(config.vae_checkpoint or pipeline.part("vae"), VAE)
    factors = {"spatial_factor": vae.config["scale_factor_spatial"], "temporal_factor": vae.config["scale_factor_temporal"]}
    plan = read_student_config(config.student_config, teachers[0].config, **factors)
    _check_student(config, plan, teachers[0])
    shift = config.sigma_shift or pipeline.shift or 1.0
    sigma = SigmaDistribution(shape=config.sigma_sampling, mean=config.sigma_mean, std=config.sigma_std, shift=shift)
    if config.noisy_source == "noise" and prompts is not None:
        say("Learning on pure noise, a baseline: sampling asks elsewhere, so expect a good loss and poor pictures")
    return DistillJob(
        config=with_sizes(config, plan),
        device=device,
        parallel=parallel,
        pipeline=pipeline,
        teachers=teachers,
        vae=vae,
        plan=plan,
        sigma=sigma,
        precision=choose_precision(config, device),
        prompts=prompts,
    )


def _check_cards(config: DistillConfig, device: torch.device, ranks: Ranks) -> None:
    """Refuse to spread a teacher over GPUs that belong to other ranks."""
    if device.type != "cuda" or ranks.ranks_here == 1 or config.strategy not in ("balanced", "sequential", "custom"):
        return
    if config.strategy == "custom":
        raise UsageError(
            "--teacher-device-strategy custom does not go with several ranks on a machine.",
            why="its map names GPUs, and each rank has others.",
            fix="Use balanced or sequential, which spread over a rank's own GPUs.",
        )
    if len(ranks.cards(torch.cuda.device_count())) == 1:
        raise UsageError(
            f"--teacher-device-strategy {config.strategy} needs several GPUs, and each of {ranks.ranks_here} ranks has one.",
            fix="Start fewer ranks (--nproc-per-node), or spread the teacher over all of them with sharded.",
        )


def _check_student(config: DistillConfig, plan: StudentPlan, teacher: StoredModel) -> None:
    if config.feature_weight and plan.config["patch_size"] != teacher.config["patch_size"]:
        raise UsageError("--feature-weight needs the same tokens in both.", fix="Give the student the teacher's patch size.")
    if config.feature_weight and config.student_init == "random":
        raise UsageError("--feature-weight needs matched blocks.", fix="Use --student-init teacher.")


def with_sizes(config: DistillConfig, plan: StudentPlan) -> DistillConfig:
    """Take the sizes of the student's description where the flags have none."""
    if config.width is None and plan.image_size is not None:
        config = replace(config, height=plan.image_size[0], width=plan.image_size[1])
    if not config.frames and plan.num_frames is not None:
        config = replace(config, frames=(plan.num_frames,))
    return config
