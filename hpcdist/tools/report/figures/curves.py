"""Training loss and metric over seconds, samples and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, RunGroup
from hpcdist.tools.report.figures.base import INK, Part, ReportFigure, axes_of, by_ranks, legend, line_styles

TITLE, ORDER = "How they got there", 2
AXES = {"seconds": "seconds of training", "samples": "samples", "bytes": "bytes sent and fetched by all ranks"}
GRID = 80  # points of a mean curve


def draw(analysis: Analysis) -> Iterator[Part]:
    """Yield the curves for each number of ranks, the largest first, and notes about missing ones."""
    for ranks, groups, text in reversed(list(by_ranks(analysis))):
        for value in (analysis.job.metric, None):
            for axis in AXES:
                yield from _curve(analysis, ranks, groups, text, value, axis)
    missing = [g.label for g in analysis.groups if g.ended and all(r.curves.losses.empty for r in g.ended)]
    if missing:
        yield f"Training loss: not measured for {'; '.join(missing)}: no steps were recorded."
    if all(result.curves.evaluations.empty for result in analysis.job.runs):
        yield "The metric over time: not measured, because no run wrote evaluations."


def _curve(
    analysis: Analysis, ranks: int, groups: Sequence[RunGroup], text: str, metric: str | None, axis: str
) -> Iterator[ReportFigure]:
    """Draw each group's metric (None: training loss) over a key of AXES: mean over seeds, and a band from min to max.

    Beyond the end of the shortest run, the curve is pale and covers the remaining seeds. `text` ends the title.
    """
    title = "training loss" if metric is None else f"test {metric}"
    figure, axes = axes_of(2.7)
    alt_text = []
    for group in groups:
        runs = [(result.curves.losses, "loss") if metric is None else (result.curves.evaluations, f"metric.{metric}")
                for result in group.ended]  # fmt: skip
        curves = [curve for frame, value in runs if (curve := _series(frame, axis, value))]
        if not curves:
            continue
        x, low, mean, high, count = _band(curves)
        # The index of the last point with all seeds.
        style, last_full = line_styles(analysis)[group.name], np.flatnonzero(count == len(curves))[-1]
        for part, pale in ((slice(last_full + 1), 1.0), (slice(last_full, None), 0.4)):
            kwargs: dict[str, Any] = (
                {"label": group.display_name, "markevery": (0.1, 0.25)}
                if pale == 1.0
                else {"marker": "", "linestyle": ":"}
            )
            axes.plot(x[part], mean[part], **{**style._asdict(), **kwargs}, alpha=pale)
            if len(curves) > 1:
                axes.fill_between(x[part], low[part], high[part], color=style.color, alpha=0.18 * pale, linewidth=0)
        ends = f"{wording.number(x[0])} to {wording.number(x[last_full])} {axis}"
        alt_text.append(f"{group.display_name} goes from {mean[0]:.4g} to {mean[last_full]:.4g} over {ends}")
        if last_full + 1 < len(x):
            alt_text[-1] += f", and with fewer seeds to {mean[-1]:.4g} at {wording.number(x[-1])}"
    if not alt_text:
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
        side = "top" if analysis.job.higher_is_better else "bottom"  # away from curves that cross the target
        axes.annotate("target", (0.99, target), xycoords=("axes fraction", "data"), ha="right", va=side, fontsize=9)
    axes.set(xlabel=AXES[axis], ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda number, _: _short(number, axis == "bytes"))
    legend(figure, axes)
    has_seeds = any(len(group.ended) > 1 for group in groups)
    seeds = ["The band spans the seeds; it is pale, and the line dotted, after some seeds have ended"] * has_seeds
    name = f"{metric or 'loss'}-against-{axis}-{ranks}-ranks"
    yield ReportFigure(name, f"{wording.capital(title)} against {axis}, {text}", [*seeds, *alt_text], figure, ranks)


def _series(frame: Any, axis: str, value: str) -> list[tuple[float, float]]:
    """Return the points of column `value` over column `axis`, both finite; empty without the column."""
    if value not in frame:
        return []
    points = frame[[axis, value]].astype(float).to_numpy()
    return [(x, y) for x, y in points.tolist() if math.isfinite(x) and math.isfinite(y)]


def _band(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, ...]:
    """Interpolate curves from where all have started to where the last one ends.

    Returns:
        The points, the lowest, mean and highest value of the curves that reach them, and the number of these curves.
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
