"""Figures, tables and remarks of a section, and how figures are drawn."""

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

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, RunGroup
from hpcdist.tools.statistics import Interval

INK = "#010203"  # of text and axes: replaced by the page's own colour
# At least 3:1 on white and on the dark page; told apart by people who are colour-blind, with markers and dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c9579b", "#8a6fe0", "#7d828a")
MARKERS = "osD^vPX*"
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
LABEL_COLUMNS, LEGEND_COLUMNS = 18, 44
WIDTH = 4.0  # inches: as wide as a phone, so that text stays readable there
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
    """A figure.

    Attributes:
        name: of its file.
        said: what it shows, in numbers and words, for those who do not see it.
        ranks: the number of ranks of all that it shows. Of several numbers, the page unfolds the first only.
    """

    name: str
    title: str
    said: Sequence[str]
    figure: Figure
    ranks: int | None = None


@dataclass(frozen=True)
class ReportTable:
    """A table: a caption, the columns' heads, and rows whose first cell is their head."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


Part = ReportFigure | ReportTable | str  # of a section; a text is a remark


@dataclass(frozen=True)
class Section:
    """A part of the page: what its plug-in has drawn.

    `figures`: by number of ranks, of which the page shows the first and folds away the others; None: any number.
    """

    name: str
    title: str
    figures: Mapping[int | None, Sequence[ReportFigure]]
    tables: Sequence[ReportTable]
    remarks: Sequence[str]

    def prefixed(self, prefix: str) -> Section:
        """Return the section with a prefix before its name and those of its figures."""
        figures = {ranks: [replace(one, name=prefix + one.name) for one in of] for ranks, of in self.figures.items()}
        return replace(self, name=prefix + self.name, figures=figures)


class Look(NamedTuple):
    """How a strategy is drawn, the same in all figures."""

    color: str
    marker: str
    linestyle: object


def looks(analysis: Analysis) -> dict[str, Look]:
    """Give each name a look; the reference has the colour of the text."""
    kinds = {group.name: group.kind == "serial" for group in analysis.groups if group.name != analysis.job.reference}
    names = sorted(kinds, key=lambda name: (kinds[name], name))  # strategies first, so that their colours differ
    found = {analysis.job.reference: Look(INK, "o", "-")}
    for i, name in enumerate(names):
        dashes = DASHES[(1 + i // len(COLOURS) + i) % len(DASHES)]
        found[name] = Look(COLOURS[i % len(COLOURS)], MARKERS[(i + 1) % len(MARKERS)], dashes)
    return found


def axes_of(height: float) -> tuple[Figure, Axes]:
    """Make a figure of this height in inches, with axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(True)
    axes.set_axisbelow(True)
    return figure, axes


def svg(shown: ReportFigure) -> str:
    """Write a figure as an element that takes the page's colours and fonts, and says in words what it shows."""
    stream, figure = io.StringIO(), shown.figure
    figure.set_dpi(FigureCanvasSVG.fixed_dpi)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")  # all parts have their places now; savefig would draw once more for these
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": shown.name}):  # text stays text
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", text, count=1, flags=re.S)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    text = re.sub(r"(\bid=\"|url\(#|href=\"#)", rf"\g<1>{shown.name}-", text)  # names are unique in the whole page
    text = re.sub(r">\s+<", "><", text.replace(INK, "currentColor"))
    box = re.findall(r'viewBox="[^"]*"', text)[0]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box} role="img" '
        f'aria-labelledby="{shown.name}-title {shown.name}-desc" stroke-linejoin="round" stroke-linecap="butt">'
        f'<title id="{shown.name}-title">{escape(shown.title)}</title>'
        f'<desc id="{shown.name}-desc">{escape(shown.title)}. {escape("; ".join(shown.said))}.</desc>'
    )
    return head + text[text.index(">") + 1 :]


def legend(figure: Figure, axes: Axes) -> None:
    """Put the legend below, in as many columns as its texts leave room for."""
    handles, names = axes.get_legend_handles_labels()
    labels = [textwrap.fill(name, LEGEND_COLUMNS, break_long_words=False, break_on_hyphens=False) for name in names]
    longest = max(map(len, names), default=0)
    columns = 1 if longest > 22 else 2 if longest > 13 else 3
    lines = sum(label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns) + 0.15 * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, handlelength=2.4)


def by_ranks(analysis: Analysis) -> Iterator[tuple[int, list[RunGroup], str]]:
    """Yield each number of ranks with its cells that have a result, and with its text for titles."""
    for ranks, block in groupby((group for group in analysis.groups if group.ended), key=lambda group: group.ranks):
        groups = list(block)
        yield ranks, groups, wording.count(ranks, "rank") + " (virtual)" * any(group.virtual for group in groups)


def dots(
    analysis: Analysis,
    name: str,
    title: str,
    unit: str,
    found: Sequence[tuple[RunGroup, Collection[float], Interval | None, str]],
    write: Callable[[float], str],
    *,
    least: float | None = None,
    most: float = math.inf,
) -> list[ReportFigure]:
    """Draw a line for each cell: the values of its runs, their mean and its interval. No figure without any value.

    Args:
        found: cell, values, their mean, none where a run is left out, and a remark that stands beside them.
        least: where the axis begins; None: a little below the lowest value.
        most: the largest value that there can be, at which intervals are cut off.
    """
    if not any(values for _, values, _, _ in found):
        return []
    labels = ["\n".join(textwrap.wrap(group.label, LABEL_COLUMNS, break_long_words=False, break_on_hyphens=False))
              for group, *_ in found]  # fmt: skip
    lines = max(label.count("\n") for label in labels) + 1
    figure, axes = axes_of(0.9 + (0.26 + 0.14 * lines) * len(found))
    said, look = [], looks(analysis)
    for row, (group, values, mean, remark) in enumerate(found):
        color, marker, _ = look[group.name]
        text = remark
        if values:
            axes.plot(list(values), [row] * len(values), marker, color=color, alpha=0.35, markersize=4)
        if values and mean is None:
            text = f"{write(min(values))} at best, {remark}"
        elif values and mean is not None:
            known = mean.low < mean.high
            reach = [[mean.mean - mean.low], [mean.high - mean.mean]] if known else [[0.0], [0.0]]
            axes.errorbar(mean.mean, row, xerr=reach, fmt=marker, color=color, capsize=3, linewidth=1.6)
            within = f" ({write(mean.low)} to {write(mean.high)})" if known else ""
            text = f"{write(mean.mean)}{within}{remark and f', {remark}'}"
        said.append(f"{group.label}: {text}")
        if remark:
            axes.annotate(remark, (1, row), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=9)
    axes.set_yticks(range(len(found)), labels, fontsize=9)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel(unit)
    axes.set_xlim(left=least)
    left, right = axes.get_xlim()
    axes.set_xlim(left, min(right, most + 0.02 * (most - left)) if most < right else right)
    return [ReportFigure(name, title, said, figure)]
