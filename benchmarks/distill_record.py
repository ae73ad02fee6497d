"""A longer distillation of the teacher in the box: a third of its parameters, and its guidance learnt, so half the passes.

python benchmarks/distill_record.py --output benchmarks/results [--small --teacher FOLDER]

Distils once, on pictures and clips, with the teacher's guided velocity as the target, and then compares in the same run:
marks on held-out captions, of pictures and clips, of the guided teacher (two passes a step) and of the student (one); and the
time of one pass of each, alone and for many samples together, eager and as a recorded graph. ``--small`` is for any machine:
few steps and nothing kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import DEVICE, measure, release
from judged import Judged, distil, judge_run
from torch import nn

from wandistiller.config.distill import DistillConfig
from wandistiller.config.report import ReportConfig
from wandistiller.models.load import load_transformer
from wandistiller.models.pipeline import find_pipeline

SIDE = 64
FRAMES = 9
STUDENT = {"depth": 2}
"""Layers at the full width: 31 % of the teacher's parameters."""
LEAST_SHARE, MOST_SIZE, MOST_TIME = 0.99, 1 / 3, 0.45
SIZES_OF_BATCHES = (1, 64)


@dataclass(frozen=True)
class Pass:
    """One pass through teacher and student, in seconds."""

    what: str
    way: str
    teacher: float
    student: float

    @property
    def ratio(self) -> float:
        return self.student / self.teacher

    def __str__(self) -> str:
        times = f"teacher {1e3 * self.teacher:.2f} ms, student {1e3 * self.student:.2f} ms"
        return f"a pass, {self.what}, {self.way}: {times}, {self.ratio:.2f}"


def settings(arguments: argparse.Namespace, folder: Path) -> DistillConfig:
    """Return how the student is made."""
    student = folder / "student.json"
    student.write_text(json.dumps(STUDENT))
    return DistillConfig(
        teacher_path=arguments.teacher,
        student_config=student,
        allow_low_coverage=True,
        dataset_path=f"world:{arguments.samples}:1+{FRAMES}x{SIDE}x{SIDE}",
        cache_dir=folder / "cache",
        width=SIDE,
        height=SIDE,
        frames=(FRAMES,),
        max_aspect=1.0,
        output_dir=folder / "run",
        output_weight=0.0,
        guidance_weight=1.0,
        guidance_scale=arguments.guidance,
        num_steps=arguments.steps,
        batch_size=arguments.batch,
        learning_rate=arguments.rate,
        lr_schedule="cosine",
        warmup_steps=min(200, arguments.steps // 10),
        beta2=0.99,
        use_ema=True,
        cuda_graphs=DEVICE.type == "cuda",
        workers=arguments.workers,
        save_every=0,
        log_every=min(100, arguments.steps),
        device=DEVICE.type,
    )


def time_passes(teacher: nn.Module, student: nn.Module, sizes: Sequence[int], runs: int) -> Iterator[Pass]:
    """Time one pass of both, for pictures and clips, in batches of some sizes."""
    for frames, what in ((1, "picture"), ((FRAMES - 1) // 4 + 1, "clip")):
        for batch in sizes:
            name = f"one {what}" if batch == 1 else f"{batch} {what}s"
            ways = {"eager": eager, **({"recorded": recorded} if DEVICE.type == "cuda" else {})}
            for way, ready in ways.items():
                found = []
                for model in (teacher, student):
                    release()
                    row = measure(name, way, ready(model, frames, batch), warmup=3, runs=runs)
                    assert row.seconds is not None
                    found.append(row.seconds)
                yield Pass(name, way, *found)


def eager(model: nn.Module, frames: int, batch: int) -> Callable[[], object]:
    # Not of the first parameter: a few stay in float32.
    options = {"device": DEVICE, "dtype": model.get_submodule("patch_embedding").weight.dtype}
    inputs = {
        "hidden_states": torch.randn(batch, model.config["in_channels"], frames, SIDE // 8, SIDE // 8, **options),
        "timestep": torch.full((batch,), 500.0, device=DEVICE),
        "encoder_hidden_states": torch.randn(batch, 32, model.config["text_dim"], **options),
    }

    @torch.no_grad()
    def run() -> object:
        return model(**inputs, return_dict=False)[0]

    return run


def recorded(model: nn.Module, frames: int, batch: int) -> Callable[[], object]:
    """Return the same pass without the time that launching its kernels takes."""
    run = eager(model, frames, batch)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def judge_both(arguments: argparse.Namespace, config: DistillConfig, seconds: float) -> list[Judged]:
    """Mark pictures and clips, against the guided teacher and, for comparison, against the teacher without guidance."""
    asked = ReportConfig(num_prompts=arguments.prompts, num_shown=12, steps=arguments.solver_steps, device=DEVICE.type)
    rows = []
    for frames, what in ((1, "pictures"), (FRAMES, "clips")):
        world = f"world-heldout:{arguments.prompts}:{frames}x{SIDE}x{SIDE}"
        for scale, name in ((None, "guided"), (1.0, "unguided"))[: 1 if arguments.small else 2]:
            output = config.output_dir / f"{what}-{name}.html"
            report = replace(asked, data_path=world, frames=frames, cfg_scale=scale, output=output)
            rows.append(judge_run(f"{what}, against the {name} teacher", config, report, seconds))
    return rows


def seconds_of(run: Path) -> float:
    """Return how long a run has taken that is there already, without encoding."""
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    return float(json.loads(last)["time"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--folder", type=Path, help="where the run goes, or is already; default: a temporary one")
    parser.add_argument("--teacher", default="tiny")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--solver-steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="few steps and captions, and nothing kept")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.steps, arguments.batch, arguments.samples = 2, 2, 8
        arguments.prompts, arguments.solver_steps, arguments.workers = 1, 1, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record(arguments, folder)


def record(arguments: argparse.Namespace, folder: Path) -> None:
    config = settings(arguments, folder)
    is_there = (config.output_dir / "model" / "model_index.json").exists()
    seconds = seconds_of(config.output_dir) if is_there else distil(config)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" or arguments.small else torch.float32
    parts = (find_pipeline(arguments.teacher).part("transformer"), config.output_dir / "model" / "transformer")
    teacher, student = (load_transformer(part, dtype=dtype, device=DEVICE) for part in parts)
    passes = list(time_passes(teacher, student, *(((1,), 1) if arguments.small else (SIZES_OF_BATCHES, 20))))
    rows = judge_both(arguments, config, seconds)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (teacher, student)]
    print(*rows, *passes, sep="\n")
    print(f"parameters: {counts[1]:,} of {counts[0]:,}, {counts[1] / counts[0]:.3f}")
    print(f"wanted: marks {LEAST_SHARE:.0%}, parameters at most {MOST_SIZE:.3f}, time of a pass at most {MOST_TIME}")
    if arguments.small or arguments.teacher != "tiny":
        return
    content = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "settings": {name: getattr(arguments, name) for name in ("steps", "batch", "rate", "samples", "guidance", "prompts")},
        "parameters": {"teacher": counts[0], "student": counts[1]},
        "marks": [row.as_json() for row in rows],
        "passes": [{**vars(each), "ratio": each.ratio} for each in passes],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "distill-record.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
