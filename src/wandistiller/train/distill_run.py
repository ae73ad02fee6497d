"""The job of ``wandistiller distill``: ask the teacher, train the student, write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller.checkpoint.trained import follow_model, write_model, write_student_pipeline
from wandistiller.config.distill import DistillConfig
from wandistiller.data.buckets import largest_bucket
from wandistiller.data.cache_files import fingerprint_model
from wandistiller.data.cached_samples import CachedSamples
from wandistiller.data.encoded import EncodedData, encode_data
from wandistiller.data.teacher_records import RecordSamples, differences
from wandistiller.distributed.ranks import Ranks, joined
from wandistiller.distributed.sharding import Sharding
from wandistiller.errors import UsageError
from wandistiller.memory.activations import prepare_blocks
from wandistiller.memory.device_map import reads_files
from wandistiller.memory.estimates import Phase
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.stage import Placing
from wandistiller.memory.works import Training
from wandistiller.models.channel_adapter import CONFIG_NAME, ChannelAdapter, fit_adapter, random_adapter
from wandistiller.models.text_padding import fold_padding
from wandistiller.terminal import say
from wandistiller.train.asking import Asking, RefreshAnswers
from wandistiller.train.callbacks import Callback
from wandistiller.train.distill_job import DistillJob, prepare_distillation
from wandistiller.train.ema import MovingAverage, in_use
from wandistiller.train.graphs import GraphedCalls
from wandistiller.train.health import WatchHealth
from wandistiller.train.held_out import MeasureHeldOut
from wandistiller.train.layer_choice import score_layers
from wandistiller.train.marks import MeasureMarks
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, MatchedBlocks, Objectives, Stretches
from wandistiller.train.optimisation import Optimisation, travels_in
from wandistiller.train.parallel_choice import as_settled, settle_parallel
from wandistiller.train.prediction import Pixels, distill_work, drawn_pixels, planned_pixels
from wandistiller.train.questions import Questions, open_data, open_questions
from wandistiller.train.remedies import find_distill_remedies, going_on
from wandistiller.train.runs import Foreseen, Run, exit_code, own_folder, saved_facts
from wandistiller.train.students import Student, make_student
from wandistiller.train.studio import Studio
from wandistiller.train.teacher import Teaches
from wandistiller.train.teacher_choice import make_teacher, settle_teacher
from wandistiller.train.transformer_data import prepare_held_out

_ADAPTER_SAMPLES = 256


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


@dataclass(frozen=True)
class _Lessons:
    """What the student learns from."""

    samples: Any
    facts: Mapping[str, Any]
    """What a run that goes on has to have the same."""
    callbacks: Sequence[Callback] = ()


def run_distill(config: DistillConfig) -> Distilled:
    """Do the whole job."""
    job = _settle(prepare_distillation(config))
    needs_group = job.parallel.is_sharded or config.strategy == "sharded"
    with joined(job.device, config.rank_timeout, needs_group=needs_group) as ranks, ExitStack() as ends:
        ends.enter_context(own_folder(config, ranks))
        return _run(job, ranks, ends)


def _run(job: DistillJob, ranks: Ranks, ends: ExitStack) -> Distilled:
    config = job.config
    shapes = job.shapes
    predicted_by = as_settled(config, job.parallel)
    remedies = going_on(
        config.output_dir, lambda failure: find_distill_remedies(predicted_by, shapes, job.plan.config, failure)
    )
    monitor = Monitor([job.device], remedies)
    before = saved_facts(config, ranks)
    saved = before.facts.get("data", {}) if before is not None else {}
    facts = _facts(job)
    _check_goes_on(saved, facts)
    assert config.teacher_path is not None
    validation = prepare_held_out(config, config.teacher_path, job.device, job.patch)  # looked at before anything is encoded
    if validation is not None:
        ends.enter_context(validation.using_caches())
    questions = open_questions(job, saved, ends)
    held_out = None if validation is None else encode_data(validation)
    drawn = drawn_pixels(config, questions.samples.buckets, held_out.buckets if held_out is not None else None)
    with monitor.phase("loading", "teacher"):
        placing, note = settle_teacher(job, questions, ranks, drawn)
        teacher = make_teacher(job, questions, ranks, placing)
    if job.prompts is not None:
        facts["num_prompts"] = len(questions.samples)
    lessons = _Lessons(questions.samples, facts)
    if config.is_stored:
        assert teacher is not None  # the configuration has been checked for something to ask
        asking = Asking(job, questions, teacher, ranks, monitor, before.step if before is not None else 0)
        asking.check(saved.get("answers"))
        samples = asking.ask()
        lessons = _Lessons(samples, {**facts, "answers": asking.facts()}, [RefreshAnswers(asking, samples)])
    scores = None
    if config.layer_choice == "importance":
        with monitor.phase("scoring layers", "teacher"):
            scores = _score_layers(job, lessons.samples, teacher, ranks)
    if config.is_stored and teacher is not None:
        teacher.release()
    adapter = _make_adapter(job, questions, lessons.samples, ranks, goes_on=before is not None)
    is_asked = teacher is not None and config.asks_while_training
    foresee = _foresee(job, lessons.samples, placing if is_asked else None, drawn)
    streamed = job.teachers[0].files if is_asked and reads_files(placing.name, placing.device_map) else ()
    with monitor.phase("loading", "student"):
        student = make_student(
            job.plan,
            job.teachers[0],
            adapter=adapter,
            layer_scores=scores,
            init=config.student_init,
            allow_low_coverage=config.allow_low_coverage,
            seed=config.seed,
            # What is to be spread over ranks goes to the device in slices.
            device=torch.device("cpu") if job.parallel.is_sharded else job.device,
            prepare=fold_padding if questions.folds_padding else None,
        )
    about = [note] if note else []
    foreseen = Foreseen(foresee, streamed)
    return _train(job, ranks, monitor, student, teacher, questions, lessons, held_out, ends, adapter, foreseen, about)


def _settle(job: DistillJob) -> DistillJob:
    """Decide what was left open of how ranks train together."""
    shapes = job.shapes

    def work(config: DistillConfig, hardware: Hardware) -> Training:
        found = distill_work(config, shapes, job.plan.config, hardware, planned_pixels(config, shapes.vae, job.patch))
        # One that finds its own place, or is shared by ranks, takes what the student leaves.
        return found if config.strategy not in ("auto", "gpu0", "sharded") else replace(found, teacher=None)

    return replace(job, parallel=settle_parallel(job.config, job.device, work))


def _facts(job: DistillJob) -> dict[str, Any]:
    """Return who teaches whom, and how: what a run that goes on has to have the same."""
    config, plan = job.config, job.plan
    return {
        "teacher": {"teacher": [fingerprint_model(stored)[:16] for stored in job.teachers]},
        "student": {
            **plan.config,
            "layers": config.layer_choice if plan.layers is None else list(plan.layers),
            "text_max_length": plan.text_max_length,
            "--student-init": config.student_init,
        },
        "questions": {"--noisy-latents": config.noisy_source, "--cache-teacher": config.cache_teacher},
    }


def _check_goes_on(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse to go on with another teacher, another student or other questions than the run has; ``saved`` is of its state."""
    for name, wanted in facts.items():
        differing = differences(saved[name], wanted) if name in saved else ""
        if differing:
            raise UsageError(
                f"The run that goes on has {'other' if name == 'questions' else 'another'} {name}.",
                why=f"{differing}.",
                fix="Give the flags and files that it was started with, or start anew in another --output-dir.",
            )


def _score_layers(job: DistillJob, samples: Any, teacher: Teaches | None, ranks: Ranks) -> Sequence[float]:
    """Return the scores of the layers of the transformer that the student starts from: of two experts the first."""
    config = job.config
    assert teacher is not None
    low = (job.pipeline.boundary or 0.0) if len(job.teachers) == 2 else 0.0
    return score_layers(
        config.output_dir, job.teachers[0], teacher, samples, ranks, device=job.device, low=low, seed=config.seed
    )


def _train(
    job: DistillJob,
    ranks: Ranks,
    monitor: Monitor,
    student: Student,
    teacher: Teaches | None,
    questions: Questions,
    lessons: _Lessons,
    held_out: EncodedData | None,
    ends: ExitStack,
    adapter: ChannelAdapter | None,
    foreseen: Foreseen,
    notes: Sequence[str],
) -> Distilled:
    config, samples, role = job.config, lessons.samples, _student_role(job, ranks, student, ends)
    run = Run.over(samples.buckets, config, job.device, job.precision, ranks, monitor)
    method = Distillation(
        role,
        teacher,
        Objectives.of(config),
        guidance_scale=config.guidance,
        dtype=torch.float32,
        matched=_match_blocks(student, job.teacher_config["num_layers"]),
        adapter=adapter,
        stretches=_stretches(job),
        max_text_tokens=job.plan.text_max_length,
    )
    average = run.make_average(role)
    callbacks: list[Callback] = [*lessons.callbacks, WatchHealth()]
    validation = open_data(job, held_out, questions.folds_padding) if held_out is not None else None
    measure = None
    if validation is not None:
        measure = MeasureHeldOut(method, validation, job.sigma, run, average=average)
        callbacks.append(measure)
    studio = Studio(
        config=config,
        pipeline=job.pipeline,
        vae=job.vae,
        device=job.device,
        dtype=torch.float32,
        adapter=adapter,
        max_text_tokens=job.plan.text_max_length,
    )
    looks = studio.callbacks(run, role, questions.samples, validation, average)
    callbacks += looks
    options = run.optimiser_options(name=config.optimizer_name, betas=(config.beta1, config.beta2))
    optimisation = Optimisation(role.trained_parameters, options, job.precision, job.device, keeps_gradients=config.cuda_graphs)
    if ranks.is_first:
        student.save_facts(config.output_dir / "student.json", job.plan)
    about = [*_describe(job, run, student), *notes]
    optimisations = {role.name: optimisation}
    stopped = run.train(
        method, optimisations, samples, average=average, callbacks=callbacks, about=about, foreseen=foreseen, data=lessons.facts
    )
    output = None
    if stopped.signal is None:
        with monitor.phase("writing the result", "student"):
            output = _write_result(job, ranks, student, average, adapter)
    marks = next((look.shares for look in looks if isinstance(look, MeasureMarks)), {})
    return Distilled(stopped.step, output, measure.losses if measure else {}, marks, exit_code(stopped, ranks))


def _student_role(job: DistillJob, ranks: Ranks, student: Student, ends: ExitStack) -> Role:
    """Return the student ready for training: its blocks compiled, recomputed, in slices or recorded, as was asked for."""
    config, role = job.config, Role("student", student.model, is_trained=True)
    blocks = list(student.model.get_submodule("blocks").children())
    to_host = config.activations_to_host
    prepare_blocks(blocks, job.device, ends, compiled=config.torch_compile, policy=config.policy, to_host=to_host)
    mesh = job.parallel.mesh(ranks, job.device)
    if mesh is not None:
        role.sharding = Sharding(student.model, blocks, mesh, travels_in(job.precision))
    if config.cuda_graphs:
        role.call = GraphedCalls(role.model, job.precision, job.device)
    return role


def _foresee(job: DistillJob, samples: Any, placing: Placing | None, drawn: Pixels | None) -> Callable[[Hardware], Phase]:
    """Return what predicts the training, with the teacher where it is; None where nobody asks it any more."""
    shapes, config = job.shapes, as_settled(job.config, job.parallel)

    def make(hardware: Hardware) -> Phase:
        work = distill_work(config, shapes, job.plan.config, hardware, largest_bucket(samples.buckets).shape, drawn)
        if placing is None:
            return replace(work, teacher=None).phase(hardware)
        is_found_here = config.strategy == "auto" or placing.is_spread
        return (work.with_teacher(placing) if is_found_here else work).phase(hardware)

    return make


def _stretches(job: DistillJob) -> Stretches | None:
    """Let the experts of a teacher take turns, where there are two and the teacher is asked while training."""
    boundary = job.pipeline.boundary
    if len(job.teachers) == 1 or boundary is None or job.config.is_stored:
        return None
    return Stretches([replace(job.sigma, low=boundary), replace(job.sigma, high=boundary)], job.config.expert_steps)


def _make_adapter(job: DistillJob, questions: Questions, samples: Any, ranks: Ranks, *, goes_on: bool) -> ChannelAdapter | None:
    """Return the map to the student's channels, where they are others: made once, at the start of the run.

    One that is there is taken by a run that goes on; else it is of something else that was tried in the same folder.
    """
    channels = job.plan.config["in_channels"]
    if channels == job.teacher_config["in_channels"]:
        return None
    folder = job.config.output_dir / "channel_adapter"
    is_there = goes_on and (folder / CONFIG_NAME).is_file()
    if ranks.is_first and not is_there:
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


def _some_latents(questions: Questions, samples: Any) -> Iterator[Tensor]:
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


def _describe(job: DistillJob, run: Run, student: Student) -> list[str]:
    count = sum(parameter.numel() for parameter in student.model.parameters())
    whole = job.teachers[0].num_parameters
    return [
        student.note,
        f"Distilling {whole / 1e6:.1f} M parameters into {count / 1e6:.1f} M ({count / whole:.0%}) for {run.num_steps} steps "
        f"of {run.samples_per_step} samples, {run.num_epochs:.1f} epochs",
    ]


def _write_result(
    job: DistillJob, ranks: Ranks, student: Student, average: MovingAverage | None, adapter: ChannelAdapter | None
) -> Path:
    target = job.config.output_dir / "model"
    with in_use(average):
        if ranks.is_first:
            write_student_pipeline(
                target,
                job.pipeline,
                lambda path: write_model(path, student.model),
                vae=job.vae if job.config.vae_checkpoint else None,
                adapter=adapter,
                max_text_tokens=job.plan.text_max_length,
                learnt_guidance=job.config.guidance if job.config.guidance_weight else None,
            )
        else:
            follow_model(student.model)
    if ranks.is_first:
        say(f"Wrote {target}")
        if adapter is not None:
            say(f"WanPipeline cannot apply the adapter of its latent channels; draw with: wandistiller sample --model {target}")
    ranks.wait_long()
    return target
