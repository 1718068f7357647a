"""Figures, tables and notes of a report's section, and helpers to draw them."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcdist.tools import console
from hpcdist.tools.report.analysis import Analysis, RunGroup
from hpcdist.tools.statistics import Interval

INK = "#010203"  # of text and axes: replaced by the page's colour
# Contrast 3:1 or more on the light and on the dark page; distinguishable when colour-blind, with markers and dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c9579b", "#8a6fe0", "#7d828a")
MARKERS = "osD^vPX*"
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
LABEL_COLUMNS, LEGEND_COLUMNS = 18, 44
WIDTH = 4.0  # inches: readable on a phone
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
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
    """A figure of a report.

    Attributes:
        name: file name without suffix.
        alt_text: text description for readers who can't see the figure.
        ranks: number of ranks shown; of figures that differ in it, the page unfolds the first only.
    """

    name: str
    title: str
    alt_text: Sequence[str]
    figure: Figure
    ranks: int | None = None


@dataclass(frozen=True)
class ReportTable:
    """A table of a report: a caption, column heads, and rows that start with their head."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


Part = ReportFigure | ReportTable | str  # of a section; a str is a note


@dataclass(frozen=True)
class Section:
    """A section of the page, drawn by one plug-in. Of `figures`, by number of ranks, the page folds all but one."""

    name: str
    title: str
    figures: Mapping[int | None, Sequence[ReportFigure]]
    tables: Sequence[ReportTable]
    notes: Sequence[str]

    def prefixed(self, prefix: str) -> Section:
        """Return the section with a prefix before its name and the names of its figures."""
        figures = {ranks: [replace(f, name=prefix + f.name) for f in listed] for ranks, listed in self.figures.items()}
        return replace(self, name=prefix + self.name, figures=figures)


class LineStyle(NamedTuple):
    """Line style of a group, the same in all figures."""

    color: str
    marker: str
    linestyle: object


def line_styles(analysis: Analysis) -> dict[str, LineStyle]:
    """Assign a line style to each name; the reference has the colour of the text."""
    serial = {group.name: group.kind == "serial" for group in analysis.groups if group.name != analysis.job.reference}
    names = sorted(serial, key=lambda name: (serial[name], name))  # strategies first: their colours differ
    styles = {analysis.job.reference: LineStyle(INK, "o", "-")}
    for i, name in enumerate(names):
        dashes = DASHES[(1 + i // len(COLOURS) + i) % len(DASHES)]
        styles[name] = LineStyle(COLOURS[i % len(COLOURS)], MARKERS[(i + 1) % len(MARKERS)], dashes)
    return styles


def axes_of(height: float) -> tuple[Figure, Axes]:
    """Create a figure of this height in inches, and its axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(True)
    axes.set_axisbelow(True)
    return figure, axes


def svg(drawn: ReportFigure) -> str:
    """Render a figure as an SVG element with the page's colours and fonts, and a description for screen readers."""
    stream, figure = io.StringIO(), drawn.figure
    figure.set_dpi(FigureCanvasSVG.fixed_dpi)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")  # the layout is computed; savefig would draw again to compute it
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": drawn.name}):  # text stays text
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", text, count=1, flags=re.S)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    text = re.sub(r"(\bid=\"|url\(#|href=\"#)", rf"\g<1>{drawn.name}-", text)  # names are unique in the whole page
    text = re.sub(r">\s+<", "><", text.replace(INK, "currentColor"))
    box = re.findall(r'viewBox="[^"]*"', text)[0]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box} role="img" '
        f'aria-labelledby="{drawn.name}-title {drawn.name}-desc" stroke-linejoin="round" stroke-linecap="butt">'
        f'<title id="{drawn.name}-title">{escape(drawn.title)}</title>'
        f'<desc id="{drawn.name}-desc">{escape(drawn.title)}. {escape("; ".join(drawn.alt_text))}.</desc>'
    )
    return head + text[text.index(">") + 1 :]


def legend(figure: Figure, axes: Axes) -> None:
    """Place the legend below the axes, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    labels = [textwrap.fill(name, LEGEND_COLUMNS, break_long_words=False, break_on_hyphens=False) for name in names]
    longest = max(map(len, names), default=0)
    columns = 1 if longest > 22 else 2 if longest > 13 else 3
    lines = sum(label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns) + 0.15 * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, handlelength=2.4)


def by_ranks(analysis: Analysis) -> Iterator[tuple[int, list[RunGroup], str]]:
    """Yield each number of ranks, its groups with a result, and a text for titles."""
    for ranks, block in groupby((group for group in analysis.groups if group.ended), key=lambda group: group.ranks):
        groups = list(block)
        yield ranks, groups, console.count(ranks, "rank") + " (virtual)" * any(group.virtual for group in groups)


def dots(
    analysis: Analysis,
    name: str,
    title: str,
    unit: str,
    rows: Sequence[tuple[RunGroup, Collection[float], Interval | None, str]],
    write: Callable[[float], str],
    *,
    low: float | None = None,
    high: float = math.inf,
) -> list[ReportFigure]:
    """Draw a row per group: the values of its runs, their mean and its interval. Without values the list is empty.

    Args:
        name, title: see `ReportFigure`; `unit` is the axis' label, `write` formats a value for `alt_text`.
        rows: group, values, their mean (None: some runs have no value), and a note next to them.
        low: start of the axis; None: a little below the lowest value.
        high: largest possible value, where intervals are clipped.
    """
    if not any(values for _, values, _, _ in rows):
        return []
    labels = ["\n".join(textwrap.wrap(group.label, LABEL_COLUMNS, break_long_words=False, break_on_hyphens=False))
              for group, *_ in rows]  # fmt: skip
    lines = max(label.count("\n") for label in labels) + 1
    figure, axes = axes_of(0.9 + (0.26 + 0.14 * lines) * len(rows))
    alt_text, styles = [], line_styles(analysis)
    for row, (group, values, mean, note) in enumerate(rows):
        color, marker, _ = styles[group.name]
        text = note
        if values:
            axes.plot(list(values), [row] * len(values), marker, color=color, alpha=0.35, markersize=4)
        if values and mean is None:
            text = f"{write(min(values))} at best, {note}"
        elif values and mean is not None:
            has_interval = mean.low < mean.high
            errors = [[mean.mean - mean.low], [mean.high - mean.mean]] if has_interval else [[0.0], [0.0]]
            axes.errorbar(mean.mean, row, xerr=errors, fmt=marker, color=color, capsize=3, linewidth=1.6)
            within = f" ({write(mean.low)} to {write(mean.high)})" if has_interval else ""
            text = f"{write(mean.mean)}{within}{note and f', {note}'}"
        alt_text.append(f"{group.label}: {text}")
        if note:
            axes.annotate(note, (1, row), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=9)
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel(unit)
    axes.set_xlim(left=low)
    left, right = axes.get_xlim()
    axes.set_xlim(left, min(right, high + 0.02 * (high - left)) if high < right else right)
    return [ReportFigure(name, title, alt_text, figure)]
