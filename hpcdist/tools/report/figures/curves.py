"""Training loss and metric over seconds, samples and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, RunGroup
from hpcdist.tools.report.figures.base import INK, Part, ReportFigure, axes_of, by_ranks, legend, looks

TITLE, ORDER = "How they got there", 2
AXES = {"seconds": "seconds of training", "samples": "samples", "bytes": "bytes sent and fetched by all ranks"}
GRID = 80  # points of a mean curve


def draw(analysis: Analysis) -> Iterator[Part]:
    for ranks, groups, text in reversed(list(by_ranks(analysis))):
        for value in (analysis.job.metric, None):
            for axis in AXES:
                yield from _curve(analysis, ranks, groups, text, value, axis)
    missing = [
        group.label for group in analysis.groups if group.ended and all(r.curves.losses.empty for r in group.ended)
    ]
    if missing:
        yield f"Training loss: not measured for {'; '.join(missing)}, whose steps were not recorded."
    if all(one.curves.evaluations.empty for one in analysis.job.runs):
        yield "The metric over time: not measured, because no run wrote evaluations."


def _curve(
    analysis: Analysis, ranks: int, groups: Sequence[RunGroup], text: str, metric: str | None, axis: str
) -> Iterator[ReportFigure]:
    """Draw a metric, or the training loss, as the mean over seeds, and a band between the lowest and the highest.

    After the end of the shortest run both go on, pale, with the seeds that are left.
    """
    what = "training loss" if metric is None else f"test {metric}"
    figure, axes = axes_of(2.7)
    said = []
    for group in groups:
        runs = [(one.curves.losses, "loss") if metric is None else (one.curves.evaluations, f"metric.{metric}")
                for one in group.ended]  # fmt: skip
        curves = [curve for frame, value in runs if (curve := _series(frame, axis, value))]
        if not curves:
            continue
        x, low, mean, high, count = _band(curves)
        look, last = looks(analysis)[group.name], np.flatnonzero(count == len(curves))[-1]  # where all seeds are there
        for part, pale in ((slice(last + 1), 1.0), (slice(last, None), 0.4)):
            shown: dict[str, Any] = (
                {"label": group.shown, "markevery": (0.1, 0.25)} if pale == 1.0 else {"marker": "", "linestyle": ":"}
            )
            axes.plot(x[part], mean[part], **{**look._asdict(), **shown}, alpha=pale)
            if len(curves) > 1:
                axes.fill_between(x[part], low[part], high[part], color=look.color, alpha=0.18 * pale, linewidth=0)
        ends = f"{wording.number(x[0])} to {wording.number(x[last])} {axis}"
        said.append(f"{group.shown} goes from {mean[0]:.4g} to {mean[last]:.4g} over {ends}")
        if last + 1 < len(x):
            said[-1] += f", and with fewer seeds to {mean[-1]:.4g} at {wording.number(x[-1])}"
    if not said:
        return
    target = analysis.job.target
    if metric is None:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    elif wording.is_share(metric):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{100 * number:g} %"))
    if metric is not None and target is not None:
        axes.axhline(target, color=INK, linewidth=0.8, linestyle=":")
        side = "top" if analysis.job.higher_is_better else "bottom"  # where curves that end beyond it are not
        axes.annotate("target", (0.99, target), xycoords=("axes fraction", "data"), ha="right", va=side, fontsize=9)
    axes.set(xlabel=AXES[axis], ylabel=what)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda number, _: _short(number, axis == "bytes"))
    legend(figure, axes)
    several = any(len(group.ended) > 1 for group in groups)
    seeds = ["The band spans the seeds; where it is pale and the line dotted, some seeds have ended"] * several
    name = f"{metric or 'loss'}-against-{axis}-{ranks}-ranks"
    yield ReportFigure(name, f"{wording.capital(what)} against {axis}, {text}", [*seeds, *said], figure, ranks)


def _series(frame, axis: str, value: str) -> list[tuple[float, float]]:
    if value not in frame:
        return []
    points = frame[[axis, value]].astype(float).to_numpy()
    return [(x, y) for x, y in points.tolist() if math.isfinite(x) and math.isfinite(y)]


def _band(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, ...]:
    """Interpolate curves from where all have begun to where the last ends.

    Returns:
        Where, the lowest, the mean and the highest of the curves that have not ended there, and how many these are.
    """
    ends = sorted({curve[-1][0] for curve in curves})
    first = min(max(curve[0][0] for curve in curves), ends[0])
    known = sorted({x for curve in curves for x, _ in curve if first <= x})
    x = np.array(known) if 1 < len(known) <= GRID else np.union1d(np.linspace(first, ends[-1], GRID), ends)
    points = [np.array(curve) for curve in curves]
    y = np.array([np.interp(x, curve[:, 0], curve[:, 1], right=math.nan) for curve in points])
    return x, np.nanmin(y, 0), np.nanmean(y, 0), np.nanmax(y, 0), np.isfinite(y).sum(0)


def _short(number: float, is_bytes: bool) -> str:
    if is_bytes:
        scale, unit = wording.bytes_unit(number)
        return f"{number / scale:g} {unit}"
    return f"{number / 1000:g}k" if number >= 10_000 else f"{number:g}"
