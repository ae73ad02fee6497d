"""The job of ``wandistiller distill``: check everything, ask the teacher, train the student, write it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller.checkpoint.trained import write_model, write_student_pipeline
from wandistiller.config.distill import DistillConfig
from wandistiller.config.placement import parse_resident
from wandistiller.data.buckets import Bucket, make_buckets
from wandistiller.data.cached_samples import CachedSamples, Randomness
from wandistiller.data.encoded import EncodedData
from wandistiller.data.prompt_samples import PromptSamples
from wandistiller.data.prompt_texts import PromptTexts
from wandistiller.data.prompts import Prompts, open_prompts
from wandistiller.data.teacher_records import RecordPlan, Records, RecordSamples, TeacherRecords, record_draws
from wandistiller.distributed.ranks import Ranks, joined
from wandistiller.errors import UsageError
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.experts import Experts
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.subjects import choose_placement
from wandistiller.models.channel_adapter import CONFIG_NAME, ChannelAdapter, fit_adapter, random_adapter
from wandistiller.models.devices import DTYPES, find_dtype
from wandistiller.models.latents import latent_shape, num_tokens
from wandistiller.models.pipeline import Pipeline, find_pipeline
from wandistiller.models.sizes import usual_size
from wandistiller.models.stored import TRANSFORMER, VAE, StoredModel, inspect_checkpoint
from wandistiller.models.student_config import StudentPlan, read_student_config
from wandistiller.models.text_padding import can_fold_padding, fold_padding
from wandistiller.terminal import say
from wandistiller.train.callbacks import Callback
from wandistiller.train.ema import MovingAverage
from wandistiller.train.graphs import GraphedCalls
from wandistiller.train.health import WatchHealth
from wandistiller.train.held_out import MeasureHeldOut
from wandistiller.train.marks import MeasureMarks
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, MatchedBlocks, Objectives, Stretches
from wandistiller.train.optimisation import MixedPrecision, Optimisation
from wandistiller.train.remedies import find_distill_remedies
from wandistiller.train.rollout import roll_out
from wandistiller.train.runs import Run, choose_precision, exit_code, in_use, prepare_device
from wandistiller.train.students import Student, make_student
from wandistiller.train.studio import Studio
from wandistiller.train.teacher import ServedTeacher, Teacher, Teaches
from wandistiller.train.transformer_data import encode_held_out, encode_training_data, folds_padding, open_samples

_ADAPTER_SAMPLES = 256
_PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")


@dataclass(frozen=True)
class Distilled:
    """How a distillation ended."""

    step: int
    output: Path | None
    """The student's pipeline; None if it was interrupted."""
    losses: dict[str, float]
    """Held-out losses, where they were asked for."""
    marks: dict[str, float] = field(default_factory=dict)
    """The judge's marks at the end, where they were asked for."""
    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A distillation that has been checked: everything found, no weights read."""

    config: DistillConfig
    device: torch.device
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


@dataclass(frozen=True)
class _Questions:
    """What the teacher is asked about: samples, and which of their captions has which text."""

    samples: CachedSamples | PromptSamples
    folds_padding: bool

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        return self.samples.latent_shape(0)


def run_distill(config: DistillConfig) -> Distilled:
    """Do the whole job."""
    job = _prepare(config)
    monitor = Monitor([job.device], lambda failure: find_distill_remedies(config, failure))
    with joined(job.device) as ranks, ExitStack() as ends:
        questions = _open_questions(job)
        assert config.teacher_path is not None
        held_out = encode_held_out(config, config.teacher_path, job.device)
        with monitor.phase("loading", "teacher"):
            teacher = _make_teacher(job, questions, ranks)
        samples: Any = questions.samples
        if config.is_stored:
            with monitor.phase("asking the teacher", "teacher"):
                samples = _ask_once(job, questions, teacher, ranks)
            del teacher
            teacher = None
            gc.collect()
        adapter = _make_adapter(job, questions, samples, ranks)
        with monitor.phase("loading", "student"):
            student = make_student(
                job.plan,
                job.teachers[0],
                adapter=adapter,
                init=config.student_init,
                allow_low_coverage=config.allow_low_coverage,
                seed=config.seed,
                device=job.device,
                prepare=fold_padding if questions.folds_padding else None,
            )
        return _train(job, ranks, monitor, student, teacher, questions, samples, held_out, ends, adapter)


def _prepare(config: DistillConfig) -> _Job:
    config.check()
    assert config.teacher_path is not None
    device = prepare_device(config)
    prompts = open_prompts(config.data_path) if config.data_path is not None else None
    pipeline = find_pipeline(config.teacher_path, _PARTS)
    if not (pipeline.folder / "model_index.json").is_file():
        raise UsageError(f"{config.teacher_path} is not a diffusers pipeline.", fix="Convert it with wandistiller export.")
    names = [name for name in ("transformer", "transformer_2") if name in pipeline.parts]
    teachers = [inspect_checkpoint(pipeline.part(name), TRANSFORMER) for name in names]
    if teachers[0].config["in_channels"] != teachers[0].config["out_channels"]:
        raise UsageError("Only text-to-video models can be distilled so far.", fix="Give a T2V or TI2V checkpoint.")
    vae = inspect_checkpoint(config.vae_checkpoint or pipeline.part("vae"), VAE)
    factors = {"spatial_factor": vae.config["scale_factor_spatial"], "temporal_factor": vae.config["scale_factor_temporal"]}
    plan = read_student_config(config.student_config, teachers[0].config, **factors)
    _check_student(config, plan, teachers[0])
    shift = config.sigma_shift or pipeline.shift or 1.0
    sigma = SigmaDistribution(shape=config.sigma_sampling, mean=config.sigma_mean, std=config.sigma_std, shift=shift)
    if config.noisy_source == "noise" and prompts is not None:
        say("Learning on pure noise, a baseline: sampling asks elsewhere, so expect a good loss and poor pictures")
    return _Job(
        config=config,
        device=device,
        pipeline=pipeline,
        teachers=teachers,
        vae=vae,
        plan=plan,
        sigma=sigma,
        precision=choose_precision(config, device),
        prompts=prompts,
    )


def _check_student(config: DistillConfig, plan: StudentPlan, teacher: StoredModel) -> None:
    if config.feature_weight and plan.config["patch_size"] != teacher.config["patch_size"]:
        raise UsageError("--feature-weight needs the same tokens in both.", fix="Give the student the teacher's patch size.")
    if config.feature_weight and config.student_init == "random":
        raise UsageError("--feature-weight needs matched blocks.", fix="Use --student-init teacher.")


def _open_questions(job: _Job) -> _Questions:
    config = job.config
    if job.prompts is None:
        assert config.teacher_path is not None and config.dataset_path is not None
        data = encode_training_data(config, config.teacher_path, config.dataset_path, config.cache_dir, job.device)
        folds = folds_padding(job.teacher_config, data)
        samples = _open_data(job, data, folds)
        samples.preload()
        return _Questions(samples, folds)
    bucket = _prompt_bucket(job)
    shape = latent_shape(job.vae.config, (bucket.frames, bucket.height, bucket.width))
    folds = can_fold_padding(job.teacher_config, num_tokens(job.teacher_config, shape))
    texts = PromptTexts(
        job.prompts,
        config.cache_dir or config.output_dir / "cache",
        text_encoder=job.pipeline.part("text_encoder"),
        tokenizer=job.pipeline.part("tokenizer"),
        dtype=find_dtype(config.dtype, job.device),
        trims_text=folds,
    )
    count = _num_prompts(job)
    texts.ensure(range(count), device=job.device)
    return _Questions(PromptSamples(job.prompts, texts, count, bucket, shape, job.sigma), folds)


def _open_data(job: _Job, data: EncodedData, folds: bool) -> CachedSamples:
    randomness = Randomness(sigma=job.sigma)
    return open_samples(data, randomness, job.teacher_config, workers=job.config.workers, trims_text=folds)


def _num_prompts(job: _Job) -> int:
    """Return how many prompts are used: no more than the steps can, if nothing else is said."""
    assert job.prompts is not None
    config, total = job.config, len(job.prompts)
    if config.num_prompts is not None:
        return min(config.num_prompts, total)
    if config.num_steps is None:
        return total
    needed = config.num_steps * config.batch_size * config.gradient_accumulation
    is_rollout = config.noisy_source == "trajectories"
    per_prompt = config.rollout_steps * config.rollouts_per_prompt if is_rollout else 1
    return max(min(total, -(-needed // per_prompt)), 1)


def _prompt_bucket(job: _Job) -> Bucket:
    """Return the size that prompts are drawn at: what the flags say, or the student's description, or what is usual."""
    config, plan = job.config, job.plan
    usual = usual_size(job.vae.config)
    height, width = plan.image_size or (usual.height, usual.width)
    if config.width is not None and config.height is not None:
        height, width = config.height, config.width
    frames = config.frames[0] if config.frames else plan.num_frames or 1
    patch = job.teacher_config["patch_size"]
    spatial, temporal = job.vae.config["scale_factor_spatial"], job.vae.config["scale_factor_temporal"]
    sizes = {"multiple": spatial * patch[-1], "temporal": temporal, "max_aspect": 1.0}
    buckets = make_buckets(width, height, frame_counts=(frames,), **sizes)
    return next(bucket for bucket in buckets if bucket.frames == frames)


def _make_teacher(job: _Job, questions: _Questions, ranks: Ranks) -> Teaches | None:
    """Return who answers; nothing is loaded before the first question."""
    config = job.config
    if not _objectives(config).needs_teacher:
        return None
    name = config.strategy
    serves = name == "gpu0" and ranks.world_size > 1
    dtype = torch.bfloat16 if config.teacher_dtype == "float8" else DTYPES.get(config.teacher_dtype)
    dtype = dtype or (torch.bfloat16 if job.device.type == "cuda" else torch.float32)
    placement = choose_placement(
        "gpu" if name == "gpu0" else name,
        resident=parse_resident(config.teacher_resident, "--teacher-resident"),
        eight_bit=config.teacher_dtype == "float8",
        device_map=config.teacher_device_map,
    )
    experts = Experts(
        job.teachers,
        boundary=job.pipeline.boundary,
        device=job.device,
        dtype=dtype,
        placement=placement,
        prepare=fold_padding if questions.folds_padding else lambda model: None,
    )
    teacher = Teacher(experts, questions.samples.empty_text, device=job.device, dtype=dtype)
    if not serves:
        return teacher
    return ServedTeacher(teacher if ranks.is_first else None, ranks, job.device)


def _ask_once(job: _Job, questions: _Questions, teacher: Teaches | None, ranks: Ranks) -> RecordSamples:
    """Ask the teacher everything that the student will learn, and keep it on disk."""
    config = job.config
    assert teacher is not None
    plan = _record_plan(job, questions)
    records = TeacherRecords((config.cache_dir or config.output_dir / "cache") / "teacher" / plan.name, plan)
    # Rank 0 alone, where it alone has the teacher.
    asked = teacher if not isinstance(teacher, ServedTeacher) else teacher.alone()
    records.fill(partial(_ask, job, questions, asked), ranks, together=not isinstance(teacher, ServedTeacher))
    texts: Callable[[int], Tensor] = questions.samples.text
    return RecordSamples(records, questions.samples.buckets[0], texts)


def _record_plan(job: _Job, questions: _Questions) -> RecordPlan:
    config = job.config
    count = len(questions.samples)
    is_rollout = config.noisy_source == "trajectories"
    if not is_rollout and len(set(questions.samples.buckets)) > 1:
        raise UsageError(
            "--cache-teacher needs samples of one size.", fix="Add --max-aspect 1 and one number of --frames, or leave it away."
        )
    size = min(config.rollout_batch, count)
    about: dict[str, Any] = {
        "teacher": [str(stored.weights.path) for stored in job.teachers],
        "captions": config.data_path or config.dataset_path,
        "count": count,
        "shape": list(questions.latent_shape),
        "guidance": config.guidance_scale if is_rollout or config.guidance_weight else 1.0,
        "learns": "guided" if config.guidance_weight else "plain",
        "way": f"{job.pipeline.solver}, {config.rollout_steps} steps" if is_rollout else f"{config.teacher_draws} draws",
        "shift": job.shift,
        "seed": config.seed,
        "batch": size,
        "rounds": config.rollouts_per_prompt if is_rollout else 1,
    }
    shards = count // size * about["rounds"]  # a rest that fills no shard is left out
    per_item = config.rollout_steps if is_rollout else config.teacher_draws
    return RecordPlan(about, questions.latent_shape, shards, size * per_item)


def _ask(job: _Job, questions: _Questions, teacher: Teaches | None, number: int) -> Records:
    """Return the shard with a number."""
    config, samples = job.config, questions.samples
    assert teacher is not None
    size = min(config.rollout_batch, len(samples))
    round_number, place = divmod(number, len(samples) // size)
    items = range(place * size, (place + 1) * size)
    scale = config.guidance_scale
    if config.noisy_source != "trajectories":
        assert isinstance(samples, CachedSamples)
        learnt = scale if config.guidance_weight else 1.0
        return record_draws(samples, items, config.teacher_draws, config.seed, partial(_answer, job, teacher, learnt))
    text = torch.nn.utils.rnn.pad_sequence([samples.text(item) for item in items], batch_first=True)
    return roll_out(
        teacher,
        text.to(job.device),
        items,
        questions.latent_shape,
        solver=job.pipeline.solver,
        num_steps=config.rollout_steps,
        shift=job.shift,
        scale=scale,
        learns_guided=bool(config.guidance_weight),
        seed=config.seed + round_number,
        device=job.device,
    )


def _answer(job: _Job, teacher: Teaches, scale: float, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    moved = (each.to(job.device) for each in (noisy, sigma, text))
    return teacher.answer(*moved, scale=scale).velocity.cpu()


def _objectives(config: DistillConfig) -> Objectives:
    return Objectives(
        output=config.output_weight,
        guidance=config.guidance_weight,
        feature=config.feature_weight,
        data=config.data_weight,
    )


def _train(
    job: _Job,
    ranks: Ranks,
    monitor: Monitor,
    student: Student,
    teacher: Teaches | None,
    questions: _Questions,
    samples: Any,
    held_out: EncodedData | None,
    ends: ExitStack,
    adapter: ChannelAdapter | None,
) -> Distilled:
    config, role = job.config, Role("student", student.model, is_trained=True)
    blocks = list(student.model.get_submodule("blocks").children())
    if config.torch_compile:
        for block in blocks:
            block.forward = torch.compile(block.forward)
    if config.policy != "none" or config.activations_to_host:
        ends.callback(apply_policy(blocks, config.policy, job.device, to_host=config.activations_to_host).detach)
    if config.cuda_graphs:
        role.call = GraphedCalls(role.model, job.precision, job.device)
    run = Run.over(samples.buckets, config, job.device, job.precision, ranks, monitor)
    method = Distillation(
        role,
        teacher,
        _objectives(config),
        guidance_scale=config.guidance_scale,
        dtype=torch.float32,
        matched=_match_blocks(student, job.teacher_config["num_layers"]),
        adapter=adapter,
        stretches=_stretches(job),
    )
    average = run.make_average(role)
    callbacks: list[Callback] = [WatchHealth()]
    validation = _open_data(job, held_out, questions.folds_padding) if held_out is not None else None
    measure = None
    if validation is not None:
        every = config.validate_every
        measure = MeasureHeldOut(method, validation, job.sigma, run.metrics, every=every, average=average)
        callbacks.append(measure)
    studio = Studio(config=config, pipeline=job.pipeline, vae=job.vae, device=job.device, dtype=torch.float32, adapter=adapter)
    looks = studio.callbacks(run, role, questions.samples, validation, average)
    callbacks += looks
    options = run.optimiser_options(name=config.optimizer_name, betas=(config.beta1, config.beta2))
    optimisation = Optimisation(role.trained_parameters, options, job.precision, job.device, keeps_gradients=config.cuda_graphs)
    about = _describe(job, run, student)
    stopped = run.train(method, {role.name: optimisation}, samples, average=average, callbacks=callbacks, about=about)
    output = None
    if stopped.signal is None:
        with monitor.phase("writing the result", "student"):
            output = _write_result(job, ranks, student, average, adapter)
    marks = next((look.shares for look in looks if isinstance(look, MeasureMarks)), {})
    return Distilled(stopped.step, output, measure.losses if measure else {}, marks, exit_code(stopped, ranks))


def _stretches(job: _Job) -> Stretches | None:
    """Let the experts of a teacher take turns, where there are two and the teacher is asked while training."""
    boundary = job.pipeline.boundary
    if len(job.teachers) == 1 or boundary is None or job.config.is_stored:
        return None
    return Stretches([replace(job.sigma, low=boundary), replace(job.sigma, high=boundary)], job.config.expert_steps)


def _make_adapter(job: _Job, questions: _Questions, samples: Any, ranks: Ranks) -> ChannelAdapter | None:
    """Return the map to the student's channels, where they are others: made once, at the start of the run."""
    channels = job.plan.config["in_channels"]
    if channels == job.teacher_config["in_channels"]:
        return None
    folder = job.config.output_dir / "channel_adapter"
    if ranks.is_first and not (folder / CONFIG_NAME).is_file():
        latents = list(_some_latents(questions, samples))
        if channels < job.teacher_config["in_channels"] and latents:
            adapter = fit_adapter(channels, latents)
        else:
            adapter = random_adapter(job.teacher_config["in_channels"], channels, seed=job.config.seed, latents=latents or None)
        adapter.save(folder)
        say(f"The student has {channels} latent channels: wrote the {adapter.kind} adapter {folder}")
    ranks.wait()
    found = ChannelAdapter.load(folder)
    on_device = {name: getattr(found, name).to(job.device) for name in ("matrix", "mean", "std")}
    return replace(found, **on_device)


def _some_latents(questions: _Questions, samples: Any) -> Iterator[Tensor]:
    """Yield latents of pictures: the data set's, or those at the end of the teacher's trajectories."""
    if isinstance(questions.samples, CachedSamples):
        for index in range(min(len(questions.samples), _ADAPTER_SAMPLES)):
            yield questions.samples.latents(index)[None]
    elif isinstance(samples, RecordSamples):
        yield from samples.some_data(_ADAPTER_SAMPLES)


def _match_blocks(student: Student, num_teacher_layers: int) -> MatchedBlocks | None:
    """Let each block of the student end where the teacher's next one that the student has begins."""
    if student.layers is None:
        return None
    ends = [*(layer - 1 for layer in student.layers[1:]), num_teacher_layers - 1]
    return MatchedBlocks(range(len(student.layers)), ends, student.channels)


def _describe(job: _Job, run: Run, student: Student) -> list[str]:
    count = sum(parameter.numel() for parameter in student.model.parameters())
    whole = job.teachers[0].num_parameters
    return [
        *student.notes,
        f"Distilling {whole / 1e6:.1f} M parameters into {count / 1e6:.1f} M ({count / whole:.0%}) for {run.num_steps} steps "
        f"of {run.samples_per_step} samples, {run.num_epochs:.1f} epochs",
    ]


def _write_result(
    job: _Job, ranks: Ranks, student: Student, average: MovingAverage | None, adapter: ChannelAdapter | None
) -> Path:
    target = job.config.output_dir / "model"
    if ranks.is_first:
        with in_use(average):
            write_student_pipeline(target, job.pipeline, lambda path: write_model(path, student.model), adapter)
        say(f"Wrote {target}")
    ranks.wait()
    return target
