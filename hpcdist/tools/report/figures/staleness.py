"""How stale the gradients were that strategies have applied."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hpcdist.tools.report.analysis import Analysis
from hpcdist.tools.report.figures.base import WIDTH, Part, ReportFigure, by_ranks, looks

TITLE, ORDER = "Staleness", 3


def draw(analysis: Analysis) -> Iterator[Part]:
    fresh = []
    for ranks, groups, text in by_ranks(analysis):
        shown = [group for group in groups if max(group.staleness, default=0) > 0]
        fresh += [group.label for group in groups if group not in shown and ranks > 1]
        if not shown:
            continue
        figure = Figure(figsize=(WIDTH, 0.7 + 1.1 * len(shown)), layout="constrained")
        every = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
        said = []
        for axes, group in zip(every, shown):
            shares = group.staleness
            axes.bar(list(shares), list(shares.values()), color=looks(analysis)[group.name].color, width=0.8)
            axes.set_title(group.shown, fontsize=9, loc="left")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.yaxis.set_major_locator(MaxNLocator(3))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            mean, most = sum(value * share for value, share in shares.items()), max(shares, key=shares.__getitem__)
            often = f"most often {most} ({shares[most]:.0%} of gradients)"
            said.append(f"{group.shown}: mean {mean:.2f}, at most {max(shares)}, {often}")
        every[-1].set_xlabel("staleness in updates")
        figure.supylabel("share of gradients", fontsize=10)
        yield ReportFigure(f"staleness-{ranks}-ranks", f"Staleness of gradients, {text}", said, figure)
    if fresh:
        yield f"No gradient was stale: {'; '.join(fresh)}."
