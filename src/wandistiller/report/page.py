"""The page: headline, marks, drawings side by side, charts, memory, commands, settings. It needs nothing from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from wandistiller.data.judge import KINDS, Marks, Verdict
from wandistiller.report.charts import draw_chart
from wandistiller.report.drawing import Drawn
from wandistiller.report.figures import choose_charts
from wandistiller.report.judgement import caption_words, count_marks
from wandistiller.report.markup import Markup, tag
from wandistiller.report.pictures import show
from wandistiller.report.run_folder import RunFolder
from wandistiller.units import Bytes

_GOOD_TEACHER = 0.5
"""Marks below which the teacher is near to chance, and being like it is no merit."""


@dataclass(frozen=True)
class Column:
    """What one of them drew, and the judge's verdict on each; None where the prompt is no caption of the world."""

    drawn: Drawn
    verdicts: Sequence[Verdict | None]

    @property
    def name(self) -> str:
        return self.drawn.artist.name

    @property
    def marks(self) -> Marks | None:
        return count_marks(self.verdicts)


@dataclass(frozen=True)
class Command:
    """A command to paste, and what it is for."""

    purpose: str
    line: str


@dataclass(frozen=True, kw_only=True)
class Content:
    """All that is on the page."""

    run: RunFolder
    columns: Sequence[Column]
    """The teacher and the student; or the one model of a training without a teacher."""
    prompts: Sequence[str]
    num_shown: int
    how: str
    """How the drawings were made, in a sentence or two."""
    commands: Sequence[Command]
    predicted: Mapping[str, Bytes] | None = None
    """Memory that was expected, for ``host`` and each device."""


def build_page(content: Content) -> str:
    """Return the whole HTML file."""
    title = headline(content)
    style = resources.files("wandistiller.report").joinpath("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag("main", tag("h1", title), _tiles(content), *_marks(content), _drawings(content), *_rest(content))
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def headline(content: Content) -> str:
    """Say what was made of what."""
    first, last = content.columns[0], content.columns[-1]
    sizes = count_parameters(first.drawn.num_parameters), count_parameters(last.drawn.num_parameters)
    if len(content.columns) == 1:
        return f"{content.run.base}, {sizes[0]} parameters, trained further"
    return f"{first.drawn.artist.source}, {sizes[0]} parameters, distilled into {sizes[1]}"


def count_parameters(number: int) -> str:
    """Return a number of parameters as people say it."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g}\u00a0{unit}"
    return str(number)


def _tiles(content: Content) -> Markup:
    run, columns = content.run, content.columns
    tiles = []
    for column in columns:
        tiles.append((column.name, count_parameters(column.drawn.num_parameters), "parameters"))
    if len(columns) == 2:
        teacher, student = (column.drawn.num_parameters for column in columns)
        tiles.append(("Size", f"{student / teacher:.0%}", "of the teacher's parameters"))
    tiles.append(("Training", f"{run.metrics.step:,}", f"steps in {_duration(run.metrics.minutes)}"))
    marks = [column.marks for column in columns]
    if len(marks) == 2 and marks[0] is not None and marks[1] is not None:
        note = f"of the teacher's marks (N\u00a0=\u00a0{marks[0].total.total()} attributes)"
        tiles.append(("Quality", _percent(marks[1].overall, marks[0].overall), note))
    parts = [
        tag("div", tag("span", name), tag("strong", number), tag("span", note), class_="tile") for name, number, note in tiles
    ]
    return tag("div", *parts, class_="tiles")


def _duration(minutes: float) -> str:
    return f"{minutes * 60:.0f} s" if minutes < 2 else f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.1f} h"


def _percent(share: float, whole: float) -> str:
    return f"{share / whole:.1%}" if whole else "-"


def _marks(content: Content) -> list[Markup]:
    """Return the table of marks by kind of attribute, where the judge could judge."""
    marks = [found for column in content.columns if (found := column.marks) is not None]
    if not marks:
        return []
    rows = []
    for kind in [*(kind for kind in KINDS if marks[0].total[kind]), "overall"]:
        shares = [each.overall if kind == "overall" else each.share(kind) for each in marks]
        counts = [
            (each.right.total(), each.total.total()) if kind == "overall" else (each.right[kind], each.total[kind])
            for each in marks
        ]
        cells = [
            tag("td", f"{share:.1%}", tag("small", f" {right} of {total}"))
            for share, (right, total) in zip(shares, counts, strict=True)
        ]
        if len(shares) == 2:
            cells.append(tag("td", _percent(shares[1], shares[0])))
        rows.append(tag("tr", tag("th", kind), *cells, class_="sum" if kind == "overall" else None))
    names = [column.name for column in content.columns]
    heads = ["attribute", *names, *(["Student / teacher"] if len(names) == 2 else [])]
    judged = sum(verdict is not None for verdict in content.columns[0].verdicts)
    note = f"N = {judged} captions. The judge looks in each picture for every attribute that its caption names."
    if len(marks) == 2 and marks[0].overall < _GOOD_TEACHER:
        note += f" The teacher itself gets only {marks[0].overall:.0%} right, so the student's share of that says little."
    table = tag("table", tag("tr", *(tag("th", head) for head in heads)), *rows, class_="numbers")
    return [tag("section", tag("h2", "Marks"), tag("p", note), tag("div", table, class_="scroll"))]


def _drawings(content: Content) -> Markup:
    shown = range(min(content.num_shown, len(content.prompts)))
    cards = [_card(content, index) for index in shown]
    left = len(content.prompts) - len(shown)
    more = [tag("p", f"{left} more were drawn and are not shown.")] if left else []
    same = " Both start from the same noise." if len(content.columns) == 2 else ""
    return tag("section", tag("h2", "Drawings"), tag("p", content.how + same), tag("div", *cards, class_="cards"), *more)


def _card(content: Content, index: int) -> Markup:
    prompt = content.prompts[index]
    halves = []
    for column in content.columns:
        verdict = column.verdicts[index]
        picture = show(column.drawn.clips[index], column.drawn.fps, f"{column.name}: {prompt}")
        said = [] if verdict is None else [_judged(prompt, verdict)]
        halves.append(tag("div", tag("h3", column.name), picture, *said))
    return tag("article", tag("p", prompt, class_="prompt"), tag("div", *halves, class_="pair"), class_="card")


def _judged(prompt: str, verdict: Verdict) -> Markup:
    right = sum(finding.is_right for finding in verdict.findings)
    if verdict.is_right:
        return tag("p", f"✓ all {right} right", class_="said right")
    words = []
    for piece in caption_words(prompt, verdict):
        if piece.finding is None or piece.finding.is_right:
            words.append(tag("span", piece.text))
        else:
            seen = piece.finding.seen
            struck = tag("s", piece.text)
            words.append(tag("mark", *([struck, f" {seen}"] if seen else [struck]), title=f"seen: {seen or 'nothing'}"))
    return tag("p", tag("b", f"{right} of {len(verdict.findings)}: "), *words, class_="said")


def _rest(content: Content) -> list[Markup]:
    charts = [draw_chart(chart) for chart in choose_charts(content.run.metrics)]
    commands = [tag("div", tag("p", each.purpose), tag("pre", each.line), class_="command") for each in content.commands]
    sections = []
    if charts:
        sections.append(tag("section", tag("h2", "Training"), tag("div", *charts, class_="charts")))
    memory = _memory(content)
    if memory is not None:
        sections.append(tag("section", tag("h2", "Memory"), memory))
    sections.append(tag("section", tag("h2", "What next"), *commands))
    sections.append(tag("section", tag("h2", "Settings"), _settings(content)))
    return sections


def _memory(content: Content) -> Markup | None:
    """Return the table of peaks while training, beside what was predicted where it was."""
    measured, predicted = content.run.memory_peaks, content.predicted or {}
    places = list(dict.fromkeys([*predicted, *measured]))
    if not places:
        return None
    heads = ["place", *(["predicted"] if predicted else []), "measured peak while training"]
    rows = []
    for place in places:
        given = [tag("td", str(predicted.get(place, "-")))] if predicted else []
        rows.append(tag("tr", tag("th", place), *given, tag("td", str(measured.get(place, "-")))))
    return tag("table", tag("tr", *(tag("th", head) for head in heads)), *rows, class_="numbers")


def _settings(content: Content) -> Markup:
    """Return the settings that are not the defaults."""
    config = content.run.config
    rows = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "config" and value != field.default:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            rows.append(tag("tr", tag("th", field.name), tag("td", shown)))
    note = f"What differs from the defaults of wandistiller {config.command}; run.toml beside the metrics has everything."
    return tag("div", tag("p", note), tag("table", *rows), class_="scroll")
