"""The study's figures, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from hpcdist.study import interval
from scaling_study.cells import Cell, Results

POINTS = 200  # of a curve
STYLES = (("C0", "o"), ("C1", "s"), ("C3", "D"), ("C2", "^"), ("C4", "v"))


def draw(of_all: Sequence[Results], folder: Path) -> list[str]:
    """Writes all figures; their names."""
    figures = {f"loss_time_{results.steps}_{results.target:g}": loss_time(results) for results in of_all}
    names = []
    for name, figure in (figures | {"target_workers": target_workers(of_all)}).items():
        for ending in ("png", "svg"):
            figure.savefig(folder / f"{name}.{ending}", dpi=150)
            names.append(f"{name}.{ending}")
    return names


def loss_time(results: Results) -> Figure:
    """Test loss against virtual time, a panel per number of workers: means of all seeds, and their 95 % intervals."""
    workers = results.grid.workers
    columns = min(3, len(workers))
    rows = -(-len(workers) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    for axes, p in zip(figure.subplots(rows, columns, squeeze=False, sharey=True).flat, workers):
        for (colour, _), name in zip(STYLES, results.names()):
            cell = results.cell(name, p)
            if cell is not None:
                _curve(axes, results, cell, colour)
        drawn = np.concatenate([line.get_ydata() for panel in figure.axes for line in panel.lines])
        axes.set_ylim(drawn.min() / 1.2, drawn.max() * 1.2)  # a few seeds' intervals may be far wider
        axes.axhline(results.target, color="grey", linewidth=0.8, linestyle=":")
        axes.set(title=f"p = {p}", xlabel="virtual time [s]")
        _plain_logs(axes)
    figure.axes[0].set_ylabel("test loss of the consensus")
    figure.suptitle(f"{results.title}: {results.grid.gradients} gradients of all workers together")
    return figure


def _curve(axes: Axes, results: Results, cell: Cell, colour: str) -> None:
    curves = results.curves(cell)
    shortest_s = fmean(curve[-1][1] for curve in curves) / len(curves[0])
    moments = np.geomspace(shortest_s, min(curve[-1][1] for curve in curves), POINTS)
    logs = np.array([np.interp(moments, *np.array(curve)[:, 1:].T) for curve in curves])
    found = [interval(column) for column in np.log(logs).T.tolist()]
    axes.plot(moments, [np.exp(value.mean) for value in found], color=colour, linewidth=1, label=cell.name)
    if len(curves) > 1:
        low, high = ([np.exp(getattr(value, end)) for value in found] for end in ("low", "high"))
        axes.fill_between(moments, low, high, color=colour, alpha=0.2, linewidth=0)


def target_workers(of_all: Sequence[Results]) -> Figure:
    """Virtual time to the target against the number of workers: where the lines cross, another one is the fastest."""
    columns = min(2, len(of_all))
    rows = -(-len(of_all) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    for axes, results in zip(figure.subplots(rows, columns, squeeze=False, sharey=True).flat, of_all):
        for (colour, marker), name in zip(STYLES, results.names()):
            cells = [cell for cell in results.of(name) if results.reached(cell)]
            found = [interval(results.times_s(cell)) for cell in cells]
            halves = [0.0 if value.half != value.half else value.half for value in found]  # NaN of one seed: no bar
            style = {"color": colour, "marker": marker, "capsize": 2, "linewidth": 1, "label": name}
            if cells:
                axes.errorbar([cell.workers for cell in cells], [value.mean for value in found], halves, **style)
        axes.set(title=results.title, xlabel="workers", ylabel="virtual time [s]")
        _plain_logs(axes)
        axes.set_xticks(results.grid.workers, map(str, results.grid.workers))
    return figure


def _plain_logs(axes: Axes) -> None:
    """Logarithmic axes with plain numbers, and a legend."""
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
