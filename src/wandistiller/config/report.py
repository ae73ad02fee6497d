"""``wandistiller report``: what a training came to, on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wandistiller.config.command import CommandConfig, SolverName
from wandistiller.config.training import check_least
from wandistiller.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ReportConfig(CommandConfig):
    """Draw the same prompts from the same noise with teacher and student, and write one HTML file that shows how they compare.

    The file needs no network and nothing beside it. With captions of the procedural world both get marks.
    """

    run: Path | None = None
    """Folder of a run of distill or train that has ended: its run.toml, metrics.jsonl and model are read."""

    prompts: tuple[str, ...] = ()
    """What to draw. Default: captions of the run's held-out data; of the procedural world those that are kept from training;
    or else the first prompts of the training."""

    data_path: str | None = None
    """Prompts from elsewhere: a UTF-8 text file with one a line, or world-heldout:COUNT:FRAMESxHEIGHTxWIDTH."""

    num_prompts: int = 12
    """How many prompts are drawn, where --prompts does not say; marks of fewer than a hundred captions are rough."""

    num_shown: int = 24
    """How many of them are shown on the page; marks are of all."""

    steps: int = 20
    """Solver steps of each picture or clip."""

    solver: SolverName = "auto"
    """How to follow the flow. 'auto' takes what the run drew with, or the pipeline's own."""

    cfg_scale: float | None = None
    """Guidance of teacher and student; 1 switches it off. A student that has learnt the guided velocity draws without, in one
    pass. Default: the --guidance-scale of the distillation."""

    seed: int = 0
    """Seed of the first prompt's noise, the same for teacher and student; the others count up from it."""

    width: int | None = None
    """Width in pixels, with --height. Default: what the run was trained at."""

    height: int | None = None
    """Height in pixels, with --width. Default: what the run was trained at."""

    frames: int | None = None
    """Frames, 1 for pictures. Default: what the run was trained at, the most where there were several."""

    teacher_path: str | None = None
    """Where the teacher is now, if it is no longer where the run says."""

    device: str = "auto"
    """Where to compute: cuda, cuda:1, mps or cpu. 'auto' takes the best there is."""

    output: Path | None = None
    """File to write. Default: report.html in the run's folder."""

    def check(self) -> None:
        super().check()
        if self.run is None:
            raise UsageError("--run is missing.", fix="Name the folder of a run, such as --run runs/distill.")
        if self.prompts and self.data_path is not None:
            raise UsageError("--prompts and --data-path were both given.", fix="Choose one way to say what to draw.")
        if (self.width is None) != (self.height is None):
            raise UsageError("--width and --height go together.", fix="Give both, or neither.")
        if self.output is not None and self.output.suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"--output {self.output} is not an HTML file.", fix="End it with .html.")
        check_least(
            ("--num-prompts", self.num_prompts, 1),
            ("--num-shown", self.num_shown, 0),
            ("--steps", self.steps, 1),
            ("--cfg-scale", self.cfg_scale, 0),
            ("--width", self.width, 1),
            ("--height", self.height, 1),
            ("--frames", self.frames, 1),
        )

    @property
    def target(self) -> Path:
        """The file to write."""
        assert self.run is not None  # check() has made sure
        return self.output or self.run / "report.html"
