"""Which teacher a distillation has: where its weights live, and how ranks come to its answers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from wandistiller.config.placement import parse_resident
from wandistiller.data.buckets import largest_bucket
from wandistiller.distributed.context import ClipGroup
from wandistiller.distributed.parallel import Parallel
from wandistiller.distributed.ranks import Ranks
from wandistiller.memory.auto import Auto
from wandistiller.memory.experts import Experts
from wandistiller.memory.forecast import hardware_of
from wandistiller.memory.host_limits import available_host_memory
from wandistiller.memory.placement import Placement
from wandistiller.memory.shared_host import ranks_here
from wandistiller.memory.stage import Placing
from wandistiller.memory.subjects import choose_placement, stored_subject
from wandistiller.memory.works import Passes, Training
from wandistiller.models.text_padding import fold_padding
from wandistiller.train.across_ranks import AcrossRanks
from wandistiller.train.distill_job import DistillJob
from wandistiller.train.methods.distill import Objectives
from wandistiller.train.parallel_choice import as_settled
from wandistiller.train.prediction import Pixels, asking_work, distill_work, within_cards
from wandistiller.train.questions import Questions
from wandistiller.train.teacher import ServedTeacher, Teacher, TeacherInStep, TeacherTogether, Teaches, teacher_dtype
from wandistiller.units import Bytes


def settle_teacher(job: DistillJob, questions: Questions, ranks: Ranks, drawn: Pixels | None = None) -> tuple[Placing, str]:
    """Return where the teacher will live, and what was thought of it where that was left open.

    That is decided while the card is empty: what the student will take there is in the prediction, and what pictures of the
    size ``drawn`` take, where they are larger than the samples.
    """
    config = job.config
    resident = parse_resident(config.teacher_resident, "--teacher-resident")
    placing = Placing(
        name=config.strategy,
        resident=0 if resident == "auto" else resident,
        eight_bit=config.teacher_dtype == "float8",
        device_map=config.teacher_device_map,
    )
    if not Objectives.of(config).needs_teacher:
        return placing, ""
    if config.strategy in ("balanced", "sequential") and job.device.type == "cuda":
        limits = within_cards(_work(job, questions, drawn), hardware_of(job.device), _own_cards(job.device, ranks))
        return replace(placing, max_memory=limits), ""
    if config.strategy != "auto":
        return placing, ""
    headroom = _beside_teacher(job, questions, drawn) if job.device.type == "cuda" else None
    choice = Auto(headroom=headroom).choose(
        stored_subject(job.teachers[0], teacher_dtype(config.teacher_dtype, job.device)), job.device
    )
    chosen = replace(placing, name=choice.name, resident=getattr(choice.placement, "resident", 0))
    return chosen, f"Teacher's placement {choice}" if job.device.type == "cuda" else ""


def make_teacher(job: DistillJob, questions: Questions, ranks: Ranks, placing: Placing) -> Teaches | None:
    """Return who answers; nothing is loaded before the first question."""
    config = job.config
    if not Objectives.of(config).needs_teacher:
        return None
    name, dtype = placing.name, teacher_dtype(config.teacher_dtype, job.device)
    serves = name == "gpu0" and ranks.world_size > 1
    if name == "sharded":
        placement: Placement = AcrossRanks(_teacher_mesh(job, ranks))
    else:
        placement = choose_placement(
            "gpu" if name == "gpu0" else name,
            # More blocks may stay later, when it is known what the bus is too slow for.
            resident="auto" if config.teacher_resident == "auto" and config.strategy != "auto" else placing.resident,
            eight_bit=placing.eight_bit,
            device_map=placing.device_map,
            max_memory=placing.max_memory,
        )
    size = config.teacher_context_parallel
    group = ClipGroup(size, ranks, job.device) if size > 1 else None

    def make_ready(model: nn.Module) -> None:
        if questions.folds_padding:
            fold_padding(model)
        if group is not None:
            group.spread(model)

    experts = Experts(
        job.teachers,
        boundary=job.pipeline.boundary,
        device=job.device,
        dtype=dtype,
        placement=placement,
        prepare=make_ready,
    )
    alone = Teacher(experts, questions.samples.empty_text, device=job.device, dtype=dtype)
    if serves:
        return ServedTeacher(alone if ranks.is_first else None, ranks, job.device)
    teacher = TeacherInStep(alone, ranks) if name == "sharded" else alone
    return teacher if group is None else TeacherTogether(teacher, group, job.teacher_config)


def _beside_teacher(job: DistillJob, questions: Questions, drawn: Pixels | None) -> Bytes:
    """Return what will be held of the device beside the teacher's weights: by its answers, and by the student."""
    return _work(job, questions, drawn).phase(hardware_of(job.device)).beside("teacher")


def _work(job: DistillJob, questions: Questions, drawn: Pixels | None) -> Training | Passes:
    """Return what the teacher is for: all answers before training, or those of a step."""
    hardware, shapes = hardware_of(job.device), job.shapes
    config = as_settled(job.config, job.parallel)
    pixels = largest_bucket(questions.samples.buckets).shape
    if not config.asks_while_training:
        return asking_work(config, shapes, hardware, pixels)
    return distill_work(config, shapes, job.plan.config, hardware, pixels, drawn)


def _own_cards(device: torch.device, ranks: Ranks) -> dict[int | str, int]:
    """Return what a rank's own GPUs have free, the one that it computes on first, and its share of the host."""
    here = torch.cuda.current_device() if device.index is None else device.index
    cards = sorted(ranks.cards(torch.cuda.device_count()), key=lambda card: card != here)
    free: dict[int | str, int] = {card: torch.cuda.mem_get_info(card)[0] for card in cards}
    return {**free, "cpu": available_host_memory() // ranks.ranks_here}


def _teacher_mesh(job: DistillJob, ranks: Ranks) -> DeviceMesh:
    """Return the ranks that share a teacher: those that share the student, else those of a machine."""
    parallel = job.parallel
    if not parallel.is_sharded:
        here = ranks_here()
        parallel = Parallel("hsdp", here) if ranks.world_size > here and ranks.world_size % here == 0 else Parallel("fsdp")
    mesh = parallel.mesh(ranks, job.device)
    assert mesh is not None
    return mesh
