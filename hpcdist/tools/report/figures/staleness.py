"""Staleness of the applied gradients."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hpcdist.tools.report.analysis import Analysis
from hpcdist.tools.report.figures.base import WIDTH, Part, ReportFigure, by_ranks, line_styles

TITLE, ORDER = "Staleness", 3


def draw(analysis: Analysis) -> Iterator[Part]:
    """Yield histograms of staleness, one figure per number of ranks."""
    fresh = []
    for ranks, groups, text in by_ranks(analysis):
        stale = [group for group in groups if max(group.staleness, default=0) > 0]
        fresh += [group.label for group in groups if group not in stale and ranks > 1]
        if not stale:
            continue
        figure = Figure(figsize=(WIDTH, 0.7 + 1.1 * len(stale)), layout="constrained")
        all_axes = figure.subplots(len(stale), 1, squeeze=False, sharex=True)[:, 0]
        alt_text = []
        for axes, group in zip(all_axes, stale):
            shares = group.staleness
            axes.bar(list(shares), list(shares.values()), color=line_styles(analysis)[group.name].color, width=0.8)
            axes.set_title(group.display_name, fontsize=9, loc="left")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.yaxis.set_major_locator(MaxNLocator(3))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            mean, mode = sum(value * share for value, share in shares.items()), max(shares, key=shares.__getitem__)
            often = f"most often {mode} ({shares[mode]:.0%} of gradients)"
            alt_text.append(f"{group.display_name}: mean {mean:.2f}, at most {max(shares)}, {often}")
        all_axes[-1].set_xlabel("staleness in updates")
        figure.supylabel("share of gradients", fontsize=10)
        yield ReportFigure(f"staleness-{ranks}-ranks", f"Staleness of gradients, {text}", alt_text, figure)
    if fresh:
        yield f"No gradient was stale: {'; '.join(fresh)}."
