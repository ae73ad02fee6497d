import re

import pytest

from wandistiller.report.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Chart,
    Series,
    draw_chart,
    label_ticks,
    log_axis,
    round_axis,
    round_ticks,
    span_axis,
    thin,
)


def chart(*series, **options):
    return draw_chart(Chart(title="Loss", x_label="step", y_label="loss", series=series, **options))


def polylines(svg):
    found = re.findall(r'<polyline points="([^"]*)"', svg)
    return [[tuple(map(float, pair.split(","))) for pair in each.split()] for each in found]


def test_a_line_between_corners():
    (line,) = polylines(chart(Series("a", [(0, 0), (5, 0.25), (10, 1)])))
    assert line == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, BOTTOM - (BOTTOM - TOP) / 4), (RIGHT, TOP)]


def test_a_logarithmic_line():
    # A hundredth to one: a tenth is half-way up.
    (line,) = polylines(chart(Series("a", [(0, 0.01), (5, 0.1), (10, 1)]), is_log=True))
    assert line == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2), (RIGHT, TOP)]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 30, [0, 5, 10, 15, 20, 25, 30]),
        (0, 4000, [0, 1000, 2000, 3000, 4000]),
        (0.0, 0.3, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]),
        (3, 11, [4, 6, 8, 10]),
    ],
)
def test_round_ticks(low, high, ticks):
    assert round_ticks(low, high) == ticks


def test_steps_have_no_halves():
    assert round_ticks(0, 2, whole=True) == [0, 1, 2]
    assert span_axis([1, 2], 0, 1, whole=True).ticks == [0, 1, 2]


@pytest.mark.parametrize(
    ("values", "from_zero", "ends"),
    [
        ([0.537, 0.5371], True, (0, 0.6)),
        ([7.3], False, (0, 8)),
        ([0, 0], False, (0, 1)),
        ([-0.13, 0.98], False, (-0.5, 1)),
        ([1.0011, 1.0015], False, (1.0011, 1.0015)),
        ([], False, (0, 1)),
    ],
)
def test_the_upright_axis_ends_at_ticks(values, from_zero, ends):
    axis = round_axis(values, BOTTOM, TOP, from_zero=from_zero)
    assert (axis.low, axis.high) == pytest.approx(ends)
    assert (axis.ticks[0], axis.ticks[-1]) == (axis.low, axis.high)
    assert all(TOP <= axis(value) <= BOTTOM for value in values)


def test_logarithmic_ticks():
    assert log_axis([0.0009, 0.0105], 0, 1).ticks == [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02]
    wide = log_axis([3e-9, 2e6], 0, 1)
    assert 3 < len(wide.ticks) <= 8
    assert log_axis([0.5], 0, 1).ticks == [0.5, 1.0]


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (round_axis([0, 1e-4], 0, 1), ["0", "2e-5", "4e-5", "6e-5", "8e-5", "1e-4"]),
        (round_axis([0, 0.2], 0, 1), ["0.00", "0.05", "0.10", "0.15", "0.20"]),
        (span_axis([50_000], 0, 1), ["0", "10k", "20k", "30k", "40k", "50k"]),
        (log_axis([0.002, 1], 0, 1), ["0.01", "0.1", "1"]),
        (round_axis([-0.5, 1.0], 0, 1), ["-0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_labels(axis, labels):
    assert label_ticks(axis) == labels


def test_thinning_keeps_spikes_and_order():
    points = [(x, 1000.0 if x == 7777 else -5.0 if x == 1234 else x % 3) for x in range(10_000)]
    thinned = thin(points, 600)
    assert len(thinned) <= 600
    assert thinned == sorted(thinned)
    assert {(7777, 1000.0), (1234, -5.0)} <= set(thinned)


def test_names_and_points_are_told():
    svg = chart(Series("<b>", [(10, 0.5)]), Series("two", [(10, 0.25), (20, 0.125)]))
    assert "<title>&lt;b&gt;: 0.5 at step 10</title>" in svg
    assert "<b>" not in svg
    assert svg.count("<li>") == 2
    assert [len(line) for line in polylines(svg)] == [2]
