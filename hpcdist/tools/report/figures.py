"""Draw a report's figures with matplotlib: each with a title, and a description that says in numbers what it shows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import CellEvidence, Findings, ScalingRow
from hpcdist.tools.report.read import Point
from hpcdist.tools.statistics import interval

INK = "#010203"  # of text and axes: replaced by the page's own colour
# At least 3:1 on white and on the dark page; told apart by people who are colour-blind, with markers and dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c9579b", "#8a6fe0", "#7d828a")
PARTS = {"computing": "#0072b2", "communicating": "#d55e00", "waiting": "#7d828a"}  # of a rank's time
MARKERS = "osD^vPX*"
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
LABEL_COLUMNS = 18
WIDTH = 4.0  # inches: as wide as a phone, so that text stays readable there
AXES = {"seconds": "seconds of training", "samples": "samples", "bytes": "bytes sent and fetched by all ranks"}
MANY_RANKS = 16  # beyond them, one bar shows the mean rank
GRID = 80  # points of a mean curve
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
}


@dataclass(frozen=True)
class ReportFigure:
    """A figure, by a name that is a file's, with its section of the page."""

    name: str
    section: str
    title: str
    description: str
    figure: Figure


@dataclass(frozen=True)
class _Look:
    colour: str
    marker: str
    dashes: object


def draw(findings: Findings) -> list[ReportFigure]:
    """Draw all that there are numbers for."""
    with matplotlib.rc_context(STYLE):
        return [figure for drawing in DRAWINGS for figure in drawing(findings, _looks(findings))]


def _looks(findings: Findings) -> dict[str, _Look]:
    """Give each name a look, the same in all figures; the reference has the colour of the text."""
    kinds = {cell.name: cell.kind == "serial" for cell in findings.cells if cell.name != findings.evidence.reference}
    names = sorted(kinds, key=lambda name: (kinds[name], name))  # strategies first, so that their colours differ
    looks = {findings.evidence.reference: _Look(INK, "o", "-")}
    for i, name in enumerate(names):
        dashes = DASHES[(1 + i // len(COLOURS) + i) % len(DASHES)]
        looks[name] = _Look(COLOURS[i % len(COLOURS)], MARKERS[(i + 1) % len(MARKERS)], dashes)
    return looks


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(True)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Put the legend below, in as many columns as its texts leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    columns = 1 if longest > 22 else 2 if longest > 13 else 3
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, handlelength=2.4)


def _by_ranks(findings: Findings) -> list[tuple[int, list[CellEvidence]]]:
    cells = [cell for cell in findings.cells if cell.ended]
    return [(ranks, list(group)) for ranks, group in groupby(cells, key=lambda cell: cell.ranks)]


def _ranks_of(ranks: int, cells: Iterable[CellEvidence]) -> str:
    return f"{wording.count(ranks, 'rank')}{' (virtual)' * any(cell.virtual for cell in cells)}"


def _wrapped(label: str) -> str:
    """Split a long label into lines, so that the axes keep most of the width."""
    return "\n".join(textwrap.wrap(label, LABEL_COLUMNS, break_long_words=False, break_on_hyphens=False))


# --- means with intervals, a line for each cell -----------------------------------------------------------------------
def _mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its interval's ends, which are the mean where one value leaves them unknown."""
    found = interval(values)
    half = 0.0 if math.isnan(found.half) else found.half
    return found.mean, found.mean - half, found.mean + half


def _geometric_mean(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(math.exp(end) for end in _mean([math.log(value) for value in values]))


def _dots(
    name: str,
    section: str,
    title: str,
    unit: str,
    looks: Mapping[str, _Look],
    found: Sequence[tuple[CellEvidence, Sequence[float], str]],
    write: Callable[[float], str],
    summarise: Callable[[Sequence[float]], tuple[float, ...]] = _mean,
    most: float = math.inf,
) -> list[ReportFigure]:
    """Draw the values of each cell's runs, their mean and its interval.

    Args:
        found: cell, values, and a remark that stands beside them.
        most: the largest value that there can be, at which intervals are cut off.
    """
    if not any(values for _, values, _ in found):
        return []
    labels = [_wrapped(cell.label) for cell, _, _ in found]
    lines = max(label.count("\n") for label in labels) + 1
    figure, axes = _axes(0.9 + (0.26 + 0.14 * lines) * len(found))
    said = []
    for row, (cell, values, remark) in enumerate(found):
        look = looks[cell.name]
        if values:
            mean, low, high = summarise(values)
            axes.plot(values, [row] * len(values), look.marker, color=look.colour, alpha=0.35, markersize=4)
            reach = [[mean - low], [high - mean]]
            axes.errorbar(mean, row, xerr=reach, fmt=look.marker, color=look.colour, capsize=3, linewidth=1.6)
            within = f" ({write(low)} to {write(high)})" if low < high else ""
            said.append(f"{cell.label}: {write(mean)}{within}{remark and f', {remark}'}")
        else:
            said.append(f"{cell.label}: {remark}")
        if remark:
            axes.annotate(remark, (1, row), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=9)
    axes.set_yticks(range(len(found)), labels, fontsize=9)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel(unit)
    left, right = axes.get_xlim()
    axes.set_xlim(left, min(right, most + 0.02 * (most - left)) if most < right else right)
    return [ReportFigure(name, section, title, f"{title}. {'; '.join(said)}.", figure)]


def _targets(findings: Findings, looks: Mapping[str, _Look]) -> list[ReportFigure]:
    evidence = findings.evidence
    if evidence.target is None:
        return []
    target = wording.value(evidence.metric, evidence.target)
    found = []
    for cell in findings.cells:
        reached = list(cell.seconds_to_target.values())
        found.append((cell, reached, "" if cell.all_reached else f"{len(reached)} of {cell.tried} reached it"))
    title = f"Seconds to {evidence.metric} {target}"
    return _dots(
        "time-to-target", "answer", title, "seconds of training", looks, found, wording.seconds, _geometric_mean
    )


def _finals(findings: Findings, looks: Mapping[str, _Look]) -> list[ReportFigure]:
    metric = findings.evidence.metric
    scale = 100 if wording.value(metric, 0).endswith("%") else 1
    found = [
        (cell, [scale * value for value in cell.final.values()], f"{cell.diverged} not finite" if cell.diverged else "")
        for cell in findings.cells
        if cell.ended
    ]
    unit = " %" if scale == 100 else ""
    title, name, most = f"{_titled(metric)} at the end", f"{metric}-at-the-end", 100 if unit else math.inf
    return _dots(name, "answer", title, metric + unit, looks, found, lambda value: f"{value:.4g}{unit}", most=most)


def _titled(text: str) -> str:
    """Begin with a capital; the others stay, as in mIoU."""
    return text[:1].upper() + text[1:]


def _traffic(findings: Findings, looks: Mapping[str, _Look]) -> list[ReportFigure]:
    cells = [cell for cell in findings.cells if cell.ended and cell.ranks > 1]
    figures = []
    for name, write in (("bytes", wording.amount), ("messages", wording.number)):
        key = f"{name}_per_step"
        found = [(cell, list(cell.measure(lambda s: getattr(s, key)).values()), "") for cell in cells]
        title = f"{name.capitalize()} per step of a worker"
        figures += _dots(f"{name}-per-step", "traffic", title, name, looks, found, write)
    return figures


def _energy(findings: Findings, looks: Mapping[str, _Look]) -> list[ReportFigure]:
    found = [(cell, list(cell.measure(lambda s: s.energy.joules).values()), "") for cell in findings.cells]
    shown = [row for row in found if row[1]]
    return _dots("energy", "energy", "Energy of a run", "joules", looks, shown, lambda v: f"{wording.number(v)} J")


# --- curves -----------------------------------------------------------------------------------------------------------
def _curves(findings: Findings, looks: Mapping[str, _Look]) -> list[ReportFigure]:
    metric = findings.evidence.metric
    figures = []
    for ranks, cells in reversed(_by_ranks(findings)):
        for kind, value in (("evaluations", metric), ("losses", "loss")):
            for axis in AXES:
                figures += _curve(findings, looks, ranks, cells, kind, value, axis)
    return figures


def _curve(
    findings: Findings,
    looks: Mapping[str, _Look],
    ranks: int,
    cells: Sequence[CellEvidence],
    kind: str,
    value: str,
    axis: str,
) -> list[ReportFigure]:
    """Draw one quantity against another: the mean over seeds, and the band between the lowest and the highest."""
    what = "training loss" if kind == "losses" else f"test {value}"
    figure, axes = _axes(2.7)
    said = []
    for cell in cells:
        curves = [curve for run in cell.ended.values() if (curve := _series(getattr(run, kind), axis, value))]
        if not curves:
            continue
        x, low, mean, high = _band(curves)
        look = looks[cell.name]
        marks = {"marker": look.marker, "markevery": (0.1, 0.25)}
        axes.plot(x, mean, color=look.colour, linestyle=look.dashes, label=cell.shown, **marks)
        if len(curves) > 1:
            axes.fill_between(x, low, high, color=look.colour, alpha=0.18, linewidth=0)
        ends = f"{wording.number(x[0])} to {wording.number(x[-1])} {axis}"
        said.append(f"{cell.shown} goes from {mean[0]:.4g} to {mean[-1]:.4g} over {ends}")
    if not said:
        return []
    if kind == "evaluations" and findings.evidence.target is not None:
        axes.axhline(findings.evidence.target, color=INK, linewidth=0.8, linestyle=":")
        side = "top" if findings.evidence.higher_is_better else "bottom"  # where curves that end beyond it are not
        where = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": side}
        axes.annotate("target", (0.99, findings.evidence.target), fontsize=9, **where)
    if kind == "losses":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    elif wording.value(value, 0).endswith("%"):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{100 * number:g} %"))
    axes.set(xlabel=AXES[axis], ylabel=what)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda number, _: _short_amount(number) if axis == "bytes" else _short(number))
    _legend(figure, axes)
    title = f"{_titled(what)} against {axis}, {_ranks_of(ranks, cells)}"
    seeds = "; the band spans the seeds" if any(len(cell.ended) > 1 for cell in cells) else ""
    name = f"{'loss' if kind == 'losses' else value}-against-{axis}-{ranks}-ranks"
    return [ReportFigure(name, f"curves-{ranks}", title, f"{title}{seeds}. {'; '.join(said)}.", figure)]


def _short(number: float) -> str:
    return f"{number / 1000:g}k" if number >= 10_000 else f"{number:g}"


def _short_amount(n_bytes: float) -> str:
    power = min(4, int(math.log10(max(1, abs(n_bytes))) // 3))
    return f"{n_bytes / 1000**power:g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _series(points: Sequence[Point], axis: str, value: str) -> list[tuple[float, float]]:
    found = [(getattr(point, axis), point.values.get(value, math.nan)) for point in points]
    return [(x, y) for x, y in found if x is not None and math.isfinite(y)]


def _band(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, ...]:
    """Interpolate curves where all are known: where, the lowest, the mean and the highest."""
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    known = sorted({x for curve in curves for x, _ in curve if first <= x <= last})
    x = np.array(known) if 1 < len(known) <= GRID else np.linspace(first, last, GRID)
    y = np.array([np.interp(x, *np.transpose(curve)) for curve in curves])
    return x, y.min(0), y.mean(0), y.max(0)


# --- staleness --------------------------------------------------------------------------------------------------------
def _staleness(findings: Findings, looks: Mapping[str, _Look]) -> list[ReportFigure]:
    figures = []
    for ranks, cells in _by_ranks(findings):
        shown = [cell for cell in cells if max(cell.staleness, default=0) > 0]
        if not shown:
            continue
        figure = Figure(figsize=(WIDTH, 0.7 + 1.1 * len(shown)), layout="constrained")
        every = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
        said = []
        for axes, cell in zip(every, shown):
            values = list(cell.staleness)
            axes.bar(values, list(cell.staleness.values()), color=looks[cell.name].colour, width=0.8)
            axes.set_title(cell.shown, fontsize=9, loc="left")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.yaxis.set_major_locator(MaxNLocator(3))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            mean = sum(value * share for value, share in cell.staleness.items())
            most = max(cell.staleness, key=cell.staleness.__getitem__)
            said.append(
                f"{cell.shown}: mean {mean:.2f}, at most {max(values)}, most often {most} "
                f"({cell.staleness[most]:.0%} of gradients)"
            )
        every[-1].set_xlabel("staleness in updates")
        figure.supylabel("share of gradients", fontsize=10)
        title = f"Staleness of gradients, {_ranks_of(ranks, shown)}"
        name = f"staleness-{ranks}-ranks"
        figures.append(ReportFigure(name, "staleness", title, f"{title}. {'; '.join(said)}.", figure))
    return figures


# --- where time went --------------------------------------------------------------------------------------------------
def _times(findings: Findings, looks: Mapping[str, _Look]) -> list[ReportFigure]:
    figures = []
    for ranks, cells in _by_ranks(findings):
        heads: list[tuple[int, str]] = []  # a line of its own for each cell, then one for each rank
        bars: list[tuple[int, str, Mapping[str, float]]] = []
        said = []
        for cell in cells:
            times = {f"rank {rank}": vars(time) for rank, time in cell.times.items()}
            if len(times) > MANY_RANKS:
                parts = {part: float(np.mean([of[part] for of in times.values()])) for part in PARTS}
                times = {f"mean of {len(times)}": parts}
            heads += [(len(heads) + len(bars), cell.shown)] * bool(times)
            for rank, of in times.items():
                bars.append((len(heads) + len(bars), rank, of))
                spent = ", ".join(f"{part} {wording.seconds(of[part])}" for part in PARTS)
                said.append(f"{cell.shown}, {rank}: {spent}")
        if not bars:
            continue
        figure, axes = _axes(1.0 + 0.27 * (len(heads) + len(bars)))
        rows, left = [row for row, _, _ in bars], np.zeros(len(bars))
        for part, colour in PARTS.items():
            seconds = np.array([of[part] for _, _, of in bars])
            hatch = {"communicating": "////", "waiting": "\\\\\\\\"}.get(part, "")
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0, "height": 0.75}
            axes.barh(rows, seconds, left=left, label=part, **style)
            left += seconds
        for row, text in heads:
            axes.annotate(text, (0.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        axes.set_yticks(rows, [rank for _, rank, _ in bars], fontsize=9)
        axes.set_ylim(len(heads) + len(bars) - 0.4, -0.6)
        axes.set_xlabel("seconds, mean over runs")
        axes.grid(False, axis="y")
        _legend(figure, axes)
        title = f"Where each rank's time went, {_ranks_of(ranks, cells)}"
        name = f"time-of-{ranks}-ranks"
        figures.append(ReportFigure(name, "time", title, f"{title}. {'; '.join(said)}.", figure))
    return figures


# --- scaling ----------------------------------------------------------------------------------------------------------
def _scaling(findings: Findings, looks: Mapping[str, _Look]) -> list[ReportFigure]:
    figures = []
    for kind in ("strong", "weak"):
        rows = [row for row in findings.scaling if row.kind == kind]
        if rows:
            how = "the same total batch" if kind == "strong" else "the same batch of each worker"
            figures.append(_scaled(rows, looks, f"{kind}-speed-up", f"Speed-up at {how}", "speed-up T₁ / Tₚ", 1))
            figures.append(
                _scaled(rows, looks, f"{kind}-efficiency", f"Efficiency at {how}", "efficiency T₁ / (p·Tₚ)", 0)
            )
    return figures


def _scaled(
    rows: Sequence[ScalingRow], looks: Mapping[str, _Look], name: str, title: str, unit: str, power: int
) -> ReportFigure:
    """Draw measured beside ideal speed-up (power 1), or the efficiency, which is that over the ranks (power 0)."""
    figure, axes = _axes(2.7)
    ranks = sorted({1, *(row.cell.ranks for row in rows)})
    axes.plot(ranks, [p**power for p in ranks], color=INK, linewidth=0.9, linestyle=":", label="ideal")
    said = []
    names = sorted({row.cell.shown for row in rows})
    for number, of_name in enumerate(names):
        points = sorted((row for row in rows if row.cell.shown == of_name), key=lambda row: row.cell.ranks)
        p = np.array([row.cell.ranks for row in points])
        beside = number - (len(names) - 1) / 2  # so that intervals do not hide each other
        x = p * 2 ** (0.06 * beside) if ranks[-1] > 8 else p + 0.02 * (ranks[-1] - 1) * beside
        by = p ** (1 - power)
        found = [(row.speedup.mean, row.speedup.low, row.speedup.high) for row in points]
        mean, low, high = np.transpose(found) / by
        last = points[-1].cell
        look = looks[last.name]
        end = list(last.final.values())  # no speed-up without what was learnt
        ending = f" ({wording.mean(last.metric, interval(end))})" if end else ""
        style = {"color": look.colour, "marker": look.marker, "linestyle": look.dashes}
        axes.plot([1, *x], [1, *mean], label=f"{of_name}{ending}", **style)
        axes.vlines(x, low, high, color=look.colour, linewidth=1)  # NaN, of one seed, is not drawn
        said.append(f"{of_name}{ending}: " + ", ".join(f"{value:.3g} on {n} ranks" for n, value in zip(p, mean)))
    axes.set(xlabel="ranks", ylabel=unit)
    if max(ranks) > 8:
        axes.set_xscale("log", base=2)
        if power:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.set_xticks(ranks, list(map(str, ranks)))
    axes.minorticks_off()
    top = max([p**power for p in ranks] + [row.speedup.mean / row.cell.ranks ** (1 - power) for row in rows])
    axes.set_ylim(0 if axes.get_yscale() == "linear" else None, 1.25 * top)  # an interval may go on, of a few seeds
    _legend(figure, axes)
    title += " (virtual)" * any(row.cell.virtual for row in rows)
    return ReportFigure(name, "scaling", title, f"{title}, beside the ideal. {'; '.join(said)}.", figure)


DRAWINGS = (_targets, _finals, _curves, _staleness, _times, _scaling, _traffic, _energy)
