"""Line charts as SVG: an axis from 0 to the last step or minute, one of round numbers, and lines of which every point says
what it is when the pointer rests on it. Colours are the page's (classes ``s0``, ``s1``, ...), so that they follow its theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wandistiller.report.markup import Markup, tag

WIDTH, HEIGHT = 560, 270
LEFT, TOP, RIGHT, BOTTOM = 56.0, 28.0, 544.0, 224.0
NUM_COLOURS = 6
_MOST_POINTS = 600
_MOST_TITLES = 120
_FEW_POINTS = 40
_MOST_LOG_TICKS = 7


@dataclass(frozen=True)
class Series:
    """A line: its name and its points from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_log: bool = False
    from_zero: bool = False
    """Let the upright axis begin at 0."""
    counts_whole: bool = True
    """Whether the lower axis counts something that has no halves, such as steps."""


@dataclass(frozen=True)
class Axis:
    """How values become pixels, and the ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        at = math.log10(value) if self.is_log else value
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def draw_chart(chart: Chart) -> Markup:
    """Return the chart with its title and legend."""
    points = [point for series in chart.series for point in series.points]
    across = span_axis([x for x, _ in points], LEFT, RIGHT, whole=chart.counts_whole)
    values = [y for _, y in points]
    up = log_axis(values, BOTTOM, TOP) if chart.is_log else round_axis(values, BOTTOM, TOP, from_zero=chart.from_zero)
    lines = [_draw_series(series, index, across, up, chart.x_label) for index, series in enumerate(chart.series)]
    names = ", ".join(series.name for series in chart.series)
    label = f"{chart.title} over {chart.x_label}: {names}"
    svg = tag("svg", *_draw_axes(chart, across, up), *lines, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    keys = [
        tag("li", tag("svg", _key(index), class_="key", viewBox="0 0 26 10"), series.name)
        for index, series in enumerate(chart.series)
    ]
    return tag("figure", tag("figcaption", chart.title), tag("ul", *keys, class_="legend"), svg, class_="chart")


def span_axis(values: Iterable[float], start: float, end: float, *, whole: bool = False) -> Axis:
    """Return an axis from 0 to the largest value."""
    high = max(values, default=0.0)
    high = high if high > 0 else 1.0
    return Axis(0.0, high, start, end, round_ticks(0.0, high, whole=whole))


def round_axis(values: Iterable[float], start: float, end: float, *, from_zero: bool = False) -> Axis:
    """Return an axis whose ends are ticks, around all values."""
    values = list(values)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero or low == high:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        high = low + 1.0
    step = round_step((high - low) / 5)
    # A hair's breadth, so that 0.3 / 0.1 counts as 3.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [_multiple(number, step) for number in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def log_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """Return a logarithmic axis for values above 0; its ends are 1, 2 or 5 times a power of ten."""
    values = list(values)
    low, high = min(values), max(values)
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{digit}e{exponent}") for exponent in exponents for digit in (1, 2, 5)]
    first = max(step for step in steps if step <= low)
    last = min(step for step in steps if step >= high and step > first)
    inside = [step for step in steps if first <= step <= last]
    if len(inside) > _MOST_LOG_TICKS:
        decades = [step for step in inside if math.isclose(math.log10(step), round(math.log10(step)))]
        inside = decades[:: -(-len(decades) // _MOST_LOG_TICKS)]
    return Axis(first, last, start, end, inside, is_log=True)


def round_ticks(low: float, high: float, *, count: int = 6, whole: bool = False) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``, about ``count`` of them."""
    step = round_step((high - low) / count)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [_multiple(number, step) for number in range(first, last + 1)]


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... times a power of ten that is not below ``least``."""
    exponent = math.floor(math.log10(least))
    return next(
        step
        for step in (float(f"{digit}e{exponent + more}") for more in (0, 1) for digit in (1, 2, 5))
        if step >= least * (1 - 1e-9)
    )


def label_ticks(axis: Axis) -> list[str]:
    """Return what stands at the ticks, all written in one way."""
    largest = max(map(abs, axis.ticks), default=0.0)
    if axis.is_log:
        return [f"{tick:g}" if 0.01 <= tick < 10_000 else _powers(tick) for tick in axis.ticks]
    step = min((b - a for a, b in zip(axis.ticks, axis.ticks[1:], strict=False)), default=largest or 1.0)
    if largest < 0.01:
        return [_powers(tick) for tick in axis.ticks]
    if largest >= 10_000:
        return ["0" if tick == 0 else f"{tick / 1000:g}k" for tick in axis.ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:.{decimals}f}" for tick in axis.ticks]


def thin(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most so many points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        some = points[start : start + stretch]
        ends = {min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _multiple(number: int, step: float) -> float:
    return float(f"{number * step:.12g}")


def _powers(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _draw_axes(chart: Chart, across: Axis, up: Axis) -> list[Markup]:
    parts = []
    for tick, label in zip(up.ticks, label_ticks(up), strict=True):
        y = up(tick)
        parts.append(tag("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", label, x=LEFT - 8, y=y + 4, text_anchor="end"))
    for tick, label in zip(across.ticks, label_ticks(across), strict=True):
        x = across(tick)
        parts.append(tag("line", x1=x, x2=x, y1=BOTTOM, y2=BOTTOM + 5, class_="axis"))
        parts.append(tag("text", label, x=x, y=BOTTOM + 19, text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"))
    y_label = f"{chart.y_label} (logarithmic)" if chart.is_log else chart.y_label
    parts.append(tag("text", y_label, x=4, y=13, class_="label"))
    parts.append(tag("text", chart.x_label, x=(LEFT + RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle", class_="label"))
    return parts


def _draw_series(series: Series, index: int, across: Axis, up: Axis, x_label: str) -> Markup:
    points = thin(series.points)
    colour = f"s{index % NUM_COLOURS}"
    parts = []
    if len(points) > 1:
        path = " ".join(f"{round(across(x), 1):g},{round(up(y), 1):g}" for x, y in points)
        parts.append(tag("polyline", points=path, class_=f"line {colour}"))
    dots = f"dot {colour}" if len(points) <= _FEW_POINTS else "spot"
    titled = points[:: math.ceil(len(points) / _MOST_TITLES)] if points else []
    for x, y in titled:
        said = tag("title", f"{series.name}: {y:.4g} at {x_label} {x:.4g}")
        parts.append(tag("circle", said, cx=across(x), cy=up(y), r=3, class_=dots))
    return tag("g", *parts)


def _key(index: int) -> Markup:
    return tag("line", x1=1, x2=25, y1=5, y2=5, class_=f"line s{index % NUM_COLOURS}")
