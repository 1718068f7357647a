"""Figures of one style, with matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from hpcdist.tools.statistics import Interval

MARKERS = "osD^vP*X"
RULE = {"color": "grey", "linewidth": 0.8, "linestyle": ":"}  # of lines that mark a value
ENDINGS = ("png", "svg")


def panels(count: int, size: tuple[float, float], columns: int = 0, **shared: bool) -> tuple[Figure, list[Axes]]:
    """Make a figure of so many panels, each of `size` inches, in rows of at most `columns`, by default in one row.

    Args:
        shared: `sharex`, `sharey`: whether panels have an axis in common.
    """
    columns = min(columns or count, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for empty in found[count:]:
        empty.remove()
    return figure, found[:count]


def error_bars(axes: Axes, x: Sequence[float], found: Sequence[Interval], label: str, **style: Any) -> None:
    """Draw means with their intervals; where an interval is unknown, the mean alone."""
    halves = [value.half if value.half == value.half else 0.0 for value in found]
    axes.errorbar(x, [value.mean for value in found], halves, label=label, capsize=2, linewidth=1, **style)


def plain_logs(axes: Axes) -> None:
    """Make both axes logarithmic with plain numbers, and add a grid and a legend of what is drawn."""
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def save(figures: Mapping[str, Figure], folder: Path) -> list[str]:
    """Write figures, each as PNG and SVG; the files' names."""
    names = [(f"{name}.{ending}", figure) for name, figure in figures.items() for ending in ENDINGS]
    for name, figure in names:
        figure.savefig(folder / name, dpi=150)
    return [name for name, _ in names]
