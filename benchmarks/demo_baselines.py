"""The demo's student beside two that should be worse: one that starts from random weights, and one taught on pure noise.

python benchmarks/demo_baselines.py --output benchmarks/results [--teacher FOLDER] [--steps 20] [--small]

All three are of the same size and take the same steps of the same samples as ``make demo``; the judge marks what each draws for
the same held-out captions from the same noise as the teacher. Results are kept only of the teacher in the box. ``--small`` is
for any machine: a step each, and nothing kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from judged import Judged, distil, judge_run

from wandistiller.cli.main import COMMANDS
from wandistiller.config.distill import DistillConfig
from wandistiller.config.report import ReportConfig
from wandistiller.config.toml_file import read_config

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
SMALL: dict[str, Any] = {
    "dataset_path": "world:4:1x64x64",
    "num_steps": 1,
    "batch_size": 2,
    "warmup_steps": 0,
    "judge_samples": 0,
    "held_out": None,
    "validate_every": 0,
}


def variants(demo: DistillConfig) -> dict[str, DistillConfig]:
    """Return the demo's student and those that it is compared with."""
    return {
        "demo": demo,
        # Blocks that come from nowhere have none of the teacher's to follow.
        "random start": replace(demo, student_init="random", feature_weight=0.0),
        "taught on pure noise": replace(
            demo, dataset_path=None, data_path=demo.dataset_path or demo.data_path, noisy_latents="noise", cache_teacher=False
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--teacher", default="tiny", help="another teacher than the one in the box")
    parser.add_argument("--steps", type=int, help="other than the demo's")
    parser.add_argument("--prompts", type=int, default=200, help="captions that are drawn and judged")
    parser.add_argument("--only", nargs="+", help="names of some of them")
    parser.add_argument("--small", action="store_true", help="a step, a caption, and nothing kept")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.prompts = 1
    demo = read_config(DEMO, DistillConfig, "distill", COMMANDS)
    report = replace(read_config(DEMO, ReportConfig, "report", COMMANDS), num_prompts=arguments.prompts, num_shown=0)
    report = replace(report, steps=1) if arguments.small else report
    student = DEMO.parents[1] / demo.student_config if demo.student_config else None
    rows: list[Judged] = []
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {"teacher_path": arguments.teacher, "student_config": student}
        changes |= {"cache_dir": Path(folder) / "cache", "num_steps": arguments.steps or demo.num_steps}
        changes |= SMALL if arguments.small else {}
        for name, config in variants(replace(demo, **changes)).items():
            if not arguments.only or name in arguments.only:
                run = Path(folder) / name.replace(" ", "-")
                config = replace(config, output_dir=run)
                rows.append(judge_run(name, config, report, distil(config)))
    print(*rows, sep="\n")
    if arguments.teacher == "tiny" and not (arguments.steps or arguments.only or arguments.small):
        content = {"prompts": arguments.prompts, "rows": [row.as_json() for row in rows]}
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "demo.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
