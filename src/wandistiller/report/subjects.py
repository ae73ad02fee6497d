"""What is drawn for a report: prompts that the run was not trained on, where there are any, at the size of its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wandistiller.config.distill import DistillConfig
from wandistiller.config.report import ReportConfig
from wandistiller.data.buckets import make_buckets
from wandistiller.data.prompts import open_prompts
from wandistiller.data.sources import is_world, open_source
from wandistiller.data.world import caption_of, scene_at
from wandistiller.models.pipeline import find_pipeline
from wandistiller.models.sizes import usual_size
from wandistiller.models.stored import TRANSFORMER, VAE, inspect_checkpoint
from wandistiller.models.student_config import read_student_config
from wandistiller.report.run_folder import RunFolder

_PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")


@dataclass(frozen=True)
class Size:
    """Pixels and frames."""

    width: int
    height: int
    frames: int


@dataclass(frozen=True)
class Prompts:
    """What to draw, and where it is from, in words for the page."""

    texts: Sequence[str]
    origin: str


def choose_size(config: ReportConfig, run: RunFolder) -> Size:
    """Return the size that flags name, or else the run, its student's description, or what is usual for the model."""
    trained = run.config
    pipeline = find_pipeline(config.teacher_path or run.base, _PARTS)
    vae = inspect_checkpoint(trained.vae_checkpoint or pipeline.part("vae"), VAE).config
    usual = usual_size(vae)
    width, height, frames = usual.width, usual.height, 1
    transformer = inspect_checkpoint(pipeline.part("transformer"), TRANSFORMER).config
    spatial, temporal = vae["scale_factor_spatial"], vae["scale_factor_temporal"]
    is_said = trained.width is not None and trained.height is not None and bool(trained.frames)
    if isinstance(trained, DistillConfig) and trained.student_config is not None and not is_said:
        plan = read_student_config(trained.student_config, transformer, spatial_factor=spatial, temporal_factor=temporal)
        height, width = plan.image_size or (height, width)
        frames = plan.num_frames or frames
    if trained.width is not None and trained.height is not None:
        width, height = trained.width, trained.height
    if trained.frames:
        is_of_prompts = isinstance(trained, DistillConfig) and trained.data_path is not None
        frames = trained.frames[0] if is_of_prompts else max(trained.frames)
    # What was asked for is rounded as it was in training; what is asked for now is checked by the sampler.
    multiple = spatial * transformer["patch_size"][-1]
    bucket = make_buckets(width, height, frame_counts=(frames,), multiple=multiple, temporal=temporal, max_aspect=1.0)[-1]
    return Size(config.width or bucket.width, config.height or bucket.height, config.frames or frames)


def choose_prompts(config: ReportConfig, run: RunFolder, size: Size) -> Prompts:
    """Return the prompts that flags name, or else those that the run kept aside, or else those that it was trained on."""
    trained, count = run.config, config.num_prompts
    if config.prompts:
        return Prompts(config.prompts, "given with --prompts")
    if config.data_path is not None:
        return Prompts(_first_prompts(config.data_path, count), f"the first of {config.data_path}")
    if trained.held_out is not None:
        return Prompts(_first_captions(trained.held_out, count), f"captions of the held-out data, {trained.held_out}")
    from_prompts = trained.data_path if isinstance(trained, DistillConfig) else None
    source = from_prompts or trained.dataset_path
    assert source is not None  # the run checked it
    if is_world(source):
        scenes = [scene_at(index, moving=size.frames > 1, held_out=True) for index in range(count)]
        return Prompts([caption_of(scene) for scene in scenes], "captions of the procedural world that no training sees")
    texts = _first_prompts(source, count) if from_prompts is not None else _first_captions(source, count)
    return Prompts(texts, f"the first of {source}, which was trained on")


def _first_prompts(path: str, count: int) -> list[str]:
    prompts = open_prompts(path)
    return [prompts.prompt(index) for index in range(min(count, len(prompts)))]


def _first_captions(path: str, count: int) -> list[str]:
    source = open_source(path, skip_bad=True).source
    return [source.caption(index) for index in range(min(count, len(source)))]
