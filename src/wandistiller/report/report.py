"""The job of ``wandistiller report``: read the run, let both draw, judge, write one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wandistiller.config.command import command_line
from wandistiller.config.distill import DistillConfig
from wandistiller.config.report import ReportConfig
from wandistiller.data.judge import Marks
from wandistiller.files import check_can_write, complete_or_absent
from wandistiller.report.drawing import Artist, draw_all, prepare_jobs, sample_config
from wandistiller.report.judgement import count_marks, judge_drawings
from wandistiller.report.page import Column, Command, Content, build_page
from wandistiller.report.run_folder import RunFolder, read_run
from wandistiller.report.subjects import Prompts, Size, choose_prompts, choose_size
from wandistiller.sample.job import Job
from wandistiller.terminal import say
from wandistiller.units import Bytes

_ADAPTER_NOTE = " The student's latents go through an adapter, which wandistiller sample applies and WanPipeline cannot."


@dataclass(frozen=True)
class Reported:
    """What was written, and the marks by who drew; empty where no prompt is a caption of the procedural world."""

    output: Path
    marks: Mapping[str, Marks]


def run_report(config: ReportConfig, predicted: Mapping[str, Bytes] | None = None) -> Reported:
    """Do the whole job. ``predicted`` is the memory that was expected, for ``host`` and each device such as ``cuda:0``."""
    config.check()
    assert config.run is not None
    run = read_run(config.run)
    check_can_write(config.target)
    size = choose_size(config, run)
    prompts = choose_prompts(config, run, size)
    artists = _artists(config, run)
    jobs = prepare_jobs(artists, config, run, prompts.texts, size)
    columns = [Column(drawn, judge_drawings(drawn.clips, prompts.texts)) for drawn in draw_all(artists, jobs)]
    content = Content(
        run=run,
        columns=columns,
        prompts=prompts.texts,
        num_shown=config.num_shown,
        how=_describe(jobs, prompts),
        commands=_commands(config, run, artists[-1], prompts, size),
        predicted=predicted or run.predicted,
    )
    with complete_or_absent(config.target) as partial:
        partial.write_text(build_page(content), encoding="utf-8")
    marks = {column.drawn.artist.name.lower(): found for column in columns if (found := count_marks(column.verdicts))}
    _tell(config.target, marks)
    return Reported(config.target, marks)


def _describe(jobs: Sequence[Job], prompts: Prompts) -> str:
    job = jobs[0]
    first = job.config.seed
    is_learnt = jobs[-1].guidance != job.guidance
    return (
        f"Prompts: {prompts.origin}. {job.geometry.width}x{job.geometry.height}, frames: {job.geometry.frames}, "
        f"{job.schedule.num_steps} steps of {job.solver}, shift {job.config.sigma_shift:g}, guidance {job.guidance[0]:g}, "
        f"seeds {first} to {first + len(job.prompts) - 1}."
        + (" The student has learnt the guided velocity and draws without guidance, in half the passes." if is_learnt else "")
        + (_ADAPTER_NOTE if jobs[-1].adapter is not None else "")
    )


def _artists(config: ReportConfig, run: RunFolder) -> Sequence[Artist]:
    trained, scale = run.config, config.cfg_scale
    if not isinstance(trained, DistillConfig):
        return [Artist("Model", str(run.model), 1.0 if scale is None else scale)]
    scale = trained.guidance if scale is None else scale
    return [
        Artist("Teacher", config.teacher_path or run.base, scale),
        Artist("Student", str(run.model), 1.0 if trained.guidance_weight else scale),
    ]


def _commands(config: ReportConfig, run: RunFolder, artist: Artist, prompts: Prompts, size: Size) -> list[Command]:
    changes: dict[str, Any] = {"output_dir": run.folder, "resume": "auto", "num_steps": 2 * max(run.metrics.step, 1)}
    trained = replace(run.config, num_epochs=type(run.config)().num_epochs)  # the number of steps says it
    drawing = sample_config(config, run, artist, prompts.texts[:1], size)
    return [
        Command("Go on training, to twice as many steps", command_line(run.command, trained, changes)),
        Command(f"Draw the first prompt with the {artist.name.lower()}, as it is above", command_line("sample", drawing, {})),
    ]


def _tell(target: Path, marks: Mapping[str, Marks]) -> None:
    for name, found in marks.items():
        say(f"The judge's marks of the {name} on {found.total.total()} attributes: {found}")
    if "student" in marks and marks["teacher"].overall:
        share = marks["student"].overall / marks["teacher"].overall
        say(f"The student has {share:.1%} of the teacher's marks")
    say(f"Wrote {target}")
