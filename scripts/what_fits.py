"""Write docs/what_fits.md: what fits on which card, by the planner.

    python scripts/what_fits.py [--output docs/what_fits.md] [--sizes wan2.1-1.3b ...] [--cards rtx4090 ...]

takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from wandistiller.cli.main import let_segments_grow, parse
from wandistiller.config.command import flag_words
from wandistiller.plan.planner import Plan, make_plan
from wandistiller.plan.ranking import seconds_text

CARDS = {"rtx4060": 8, "rtx3060": 12, "rtx4080": 16, "rtx4090": 24, "rtx5090": 32, "l40s": 48, "h100": 80, "h200": 141}
"""Cards, and the gigabytes that they are sold with."""
SIZES = ("wan2.1-1.3b", "wan2.2-5b", "wan2.1-14b", "wan2.2-a14b")
SMALL_STUDENT = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
"""A student in the shape of the 1.3B."""
RAM = "128GiB"
MOST_SECONDS = 600
"""Steps that take longer are no way to do anything."""
INTRODUCTION = """# What fits on my card

Predicted by `wandistiller plan` for a machine with {ram} of host memory and a bus of 25 GB/s, without trying: no figure here
was written by hand. Each cell has the memory that PyTorch will hold of the card at most, the time of a step, and the flags that
it takes beside the command's own. Sizes of pictures and clips are those that the model is usually sampled at, unless a row says
another. Distillation is on a data set, with the teacher asked in every step. **No** is also said of what would take more than
ten minutes a step. What costs accuracy (8 bits, another optimiser, updates rounded at random) is taken where nothing else fits,
and marked ≈. Times are by the cards' published figures (the H200's are measured); memory does not depend on them.
[`plan --verify`](plan.md) holds both to real steps.

Plan your own: `wandistiller plan train --model wan2.2-5b --lora-rank 32 --card rtx4090 --ram 64GiB`
"""


def jobs(size: str, student: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a model's table, what they are called and the command that they plan; ``student`` is a file."""
    yield "a picture", ["sample", "--model", size, "--output", "a.png"]
    yield "a clip", ["sample", "--model", size, "--output", "a.mp4"]
    expert = ["--expert", "high"] if size.endswith("a14b") else []
    train = ["train", "--model", size, *expert]
    yield "LoRA of rank 32 on pictures", [*train, "--lora-rank", "32", "--frames", "1"]
    yield "LoRA of rank 32 on clips", [*train, "--lora-rank", "32"]
    yield "all weights, on pictures", [*train, "--frames", "1"]
    yield "all weights, on clips", [*train]
    distill = ["distill", "--teacher-path", size]
    yield "distilled to half its layers, on pictures", [*distill, "--frames", "1"]
    yield "distilled to half its layers, on clips", distill
    if size != "wan2.1-1.3b":
        to_small = [*distill, "--student-config", str(student)]
        yield "distilled to the size of the 1.3B, on pictures", [*to_small, "--frames", "1"]
        yield "distilled to the size of the 1.3B, on clips", to_small


def cell(plan: Plan) -> str:
    """Return the best plan in a few words."""
    best = plan.best
    if best is None or best.estimate.step_seconds > MOST_SECONDS:
        return "no"
    flags = [" ".join(flag_words({name: value})) for name, value in best.changes.items() if value not in (False, "gpu")]
    figures = f"**{best.estimate.device / 2**30:.1f} GiB**, {seconds_text(best.estimate.step_seconds)}"
    return "<br>".join([f"{figures}{'' if best.way.is_exact else ' ≈'}", *(f"`{each}`" for each in flags)])


def table(size: str, cards: tuple[str, ...], student: Path) -> Iterator[str]:
    """Yield the lines of a model's table."""
    yield f"\n## {size}\n"
    yield "| job | " + " | ".join(_heading(card) for card in cards) + " |"
    yield "|---" * (len(cards) + 1) + "|"
    for name, command in jobs(size, student):
        cells = [cell(make_plan(parse("plan", [*command, "--card", card, "--ram", RAM]))) for card in cards]
        print(size, name, "done", flush=True)
        yield f"| {name} | " + " | ".join(cells) + " |"


def _heading(card: str) -> str:
    return f"{CARDS[card]} GB ({card})"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/what_fits.md"))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--cards", nargs="+", choices=list(CARDS), default=list(CARDS))
    arguments = parser.parse_args()
    let_segments_grow()  # as the program does
    lines = [INTRODUCTION.format(ram=RAM.replace("GiB", " GiB"))]
    with tempfile.TemporaryDirectory() as folder:
        student = Path(folder) / "student.json"
        student.write_text(json.dumps(SMALL_STUDENT), encoding="utf-8")
        for size in arguments.sizes:
            lines += table(size, tuple(arguments.cards), student)
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
