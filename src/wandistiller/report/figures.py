"""Which charts are made of a run's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from wandistiller.report.charts import Chart, Series
from wandistiller.report.run_folder import Metrics

_WIDE = 10
"""A curve whose largest value is this many times its smallest is drawn on a logarithmic axis."""


def choose_charts(metrics: Metrics) -> list[Chart]:
    """Return a chart for each kind of number that was measured."""
    return [chart for chart in _all_charts(metrics) if chart.series]


def _all_charts(metrics: Metrics) -> Iterator[Chart]:
    def steps(wanted: Callable[[str], bool], prefix: str = "") -> list[Series]:
        return _series(metrics.names, wanted, metrics.over_steps, prefix)

    losses = steps(lambda name: name.endswith("loss") and not name.startswith("held_out/"))
    yield _over_steps("Loss", "loss", losses, is_log=_is_wide(losses))
    held_out = steps(lambda name: name.startswith("held_out/"), "held_out/")
    yield _over_steps("Loss on held-out data", "loss", held_out, is_log=_is_wide(held_out))
    marks = steps(lambda name: name.startswith("marks/"), "marks/")
    yield _over_steps("The judge's marks on held-out captions", "share that is right", marks, from_zero=True)
    rates = steps(lambda name: name == "rate" or name.endswith("/rate"))
    yield _over_steps("Learning rate", "learning rate", rates, from_zero=True)
    norms = steps(lambda name: name.endswith("gradient_norm"))
    yield _over_steps("Gradient norm", "norm before clipping", norms, is_log=_is_wide(norms))
    health = steps(lambda name: name.startswith("health/"), "health/")
    yield _over_steps("Health: the student's latents against the teacher's", "ratio; saturation: difference", health)
    seconds = steps(lambda name: name == "seconds_per_step")
    yield _over_steps("Seconds a step", "seconds", seconds, from_zero=True)
    yield from _memory_charts(metrics)


def _memory_charts(metrics: Metrics) -> Iterator[Chart]:
    # The peak of a phase is the same in all lines after it.
    names = [name for name in metrics.names if name.startswith("memory/") and "/peak_in_" not in name]
    unit, factor = ("minutes", 1) if metrics.minutes >= 2 else ("seconds", 60)

    def over_time(name: str) -> list[tuple[float, float]]:
        return [(factor * minute, value) for minute, value in metrics.over_minutes(name)]

    for place in dict.fromkeys(_place(name) for name in names):

        def is_here(name: str, place: str = place) -> bool:
            return name in names and _place(name) == place

        prefix = "memory/" if place == "host" else f"memory/{place}/"
        series = _series(metrics.names, is_here, over_time, prefix)
        # Nothing page-locked, no other process: a line along the axis says nothing.
        series = [each for each in series if any(y for _, y in each.points)]
        yield Chart(
            title=f"Memory of {'the host' if place == 'host' else place}",
            x_label=unit,
            y_label="GB",
            series=series,
            from_zero=True,
            counts_whole=False,
        )


def _place(name: str) -> str:
    parts = name.split("/")
    return parts[1] if len(parts) > 2 else "host"


def _series(
    names: Sequence[str],
    wanted: Callable[[str], bool],
    points: Callable[[str], list[tuple[float, float]]],
    prefix: str,
) -> list[Series]:
    found = [(name.removeprefix(prefix), points(name)) for name in names if wanted(name)]
    return [Series(_words(name), line) for name, line in found if line]


def _words(name: str) -> str:
    return name.removesuffix("_gb").replace("_", " ").replace("/", ": ")


def _over_steps(title: str, y_label: str, series: list[Series], **options: bool) -> Chart:
    return Chart(title=title, x_label="step", y_label=y_label, series=series, **options)


def _is_wide(series: Sequence[Series]) -> bool:
    values = [y for each in series for _, y in each.points]
    return bool(values) and min(values) > 0 and max(values) > _WIDE * min(values)
