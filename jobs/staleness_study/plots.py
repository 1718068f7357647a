"""The study's figures, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from hpcdist.study import Interval
from staleness_study.grid import MODULATIONS, PROTOCOLS, REFERENCE_BATCH, Results, hardsync, softsync

MARKERS = "osD^vP*X"


def draw(results: Results, folder: Path) -> list[str]:
    """Writes all figures; their names."""
    names = []
    for name, figure in (
        ("error_time", error_time(results)),
        ("error_batch", error_batch(results)),
        ("staleness", histograms(results)),
        ("modulation", modulation(results)),
    ):
        for ending in ("png", "svg"):
            figure.savefig(folder / f"{name}.{ending}", dpi=150)
            names.append(f"{name}.{ending}")
    return names


def error_time(results: Results) -> Figure:
    """Test error against virtual time: a line per number of learners, a point per batch."""
    figure, panels = _panels()
    for axes, (name, protocol) in zip(panels, PROTOCOLS.items()):
        with _plain_logs(axes, "virtual time [s]", name):
            for marker, learners in zip(MARKERS, results.grid.learners):
                cells = [protocol(batch, learners) for batch in results.grid.batches]
                times = [results.seconds(cell).mean for cell in cells]
                _line(axes, times, [results.error(cell) for cell in cells], f"λ = {learners}", marker)
    figure.suptitle(f"along each line batches of {', '.join(map(str, results.grid.batches[::-1]))} per learner")
    return figure


def error_batch(results: Results) -> Figure:
    """Test error against μλ: where the lines of all λ lie on one another, only the product matters."""
    figure, panels = _panels()
    for axes, (name, protocol) in zip(panels, PROTOCOLS.items()):
        with _plain_logs(axes, "μλ", name):
            for marker, learners in zip(MARKERS, results.grid.learners):
                cells = [protocol(batch, learners) for batch in results.grid.batches]
                totals = [cell.total_batch for cell in cells]
                _line(axes, totals, [results.error(cell) for cell in cells], f"λ = {learners}", marker)
            axes.axvline(REFERENCE_BATCH, color="grey", linewidth=0.8, linestyle=":")
    return figure


def histograms(results: Results) -> Figure:
    """How many gradients were how stale, for each n."""
    batch, learners = results.grid.probe
    splits = results.grid.splits
    figure = Figure(figsize=(2.6 * len(splits), 3), layout="constrained")
    for axes, n in zip(figure.subplots(1, len(splits)), splits):
        cell = softsync(n, "average", batch, learners)
        histogram = results.histogram(cell)
        total = sum(histogram.values())
        axes.bar(list(histogram), [count / total for count in histogram.values()], width=0.9)
        axes.axvline(cell.expected_staleness, color="C1", label=f"(λ − 1)/c = {cell.expected_staleness:.2f}")
        axes.axvline(2 * n, color="grey", linestyle=":", label=f"2n = {2 * n}")
        axes.set(title=cell.protocol, xlabel="staleness [updates]")
        axes.legend(fontsize="x-small")
    figure.axes[0].set_ylabel("part of the gradients")
    figure.suptitle(f"μ = {batch}, λ = {learners}")
    return figure


def modulation(results: Results) -> Figure:
    """Test error against n, for each rule of modulation, beside hardsync."""
    batch, learners = results.grid.probe
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    with _plain_logs(axes, "n", f"n-softsync at μ = {batch}, λ = {learners}"):
        for marker, rule in zip(MARKERS, MODULATIONS):
            errors = [results.error(softsync(n, rule, batch, learners)) for n in results.grid.splits]
            _line(axes, results.grid.splits, errors, f"modulation {rule}", marker)
        axes.axhline(results.error(hardsync(batch, learners)).mean, color="black", linewidth=0.8, label="hardsync")
    axes.set_xticks(results.grid.splits)
    return figure


def _panels() -> tuple[Figure, Iterable[Axes]]:
    """One beside the other, for each protocol."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    return figure, figure.subplots(1, len(PROTOCOLS), sharex=True, sharey=True)


@contextmanager
def _plain_logs(axes: Axes, label: str, title: str) -> Iterator[None]:
    """Logarithmic axes with plain numbers, and a legend of what is drawn inside."""
    axes.set(xscale="log", yscale="log", xlabel=label, title=title)
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("test error [%]")
    yield
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _line(axes: Axes, x: list[float], errors: list[Interval], label: str, marker: str) -> None:
    halves = [0.0 if error.half != error.half else error.half for error in errors]  # NaN of one seed: no bar
    axes.errorbar(x, [error.mean for error in errors], halves, label=label, marker=marker, capsize=2, linewidth=1)
