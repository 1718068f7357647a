"""Each rank's time by activity: computing, communicating, waiting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from pandas import DataFrame

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis
from hpcdist.tools.report.figures.base import Part, ReportFigure, ReportTable, axes_of, by_ranks, legend
from hpcdist.tools.report.results import PARTS

TITLE, ORDER = "Where time went", 4
STYLES = {"computing": ("#0072b2", ""), "communicating": ("#d55e00", "////"), "waiting": ("#7d828a", "\\\\\\\\")}
MANY_RANKS = 16  # above, one bar shows the mean over ranks


def draw(analysis: Analysis) -> Iterator[Part]:
    """Yield bars of each rank's seconds by activity, and a table of means."""
    for ranks, groups, text in by_ranks(analysis):
        group_lines: list[tuple[int, str]] = []  # a line per group, followed by one per rank
        bars: list[tuple[int, str, np.ndarray]] = []
        alt_text = []
        for group in groups:
            times = group.times.rename(lambda rank: f"rank {rank}")
            if len(times) > MANY_RANKS:
                times = DataFrame({f"mean of {len(times)}": times.mean()}).T
            group_lines += [(len(group_lines) + len(bars), group.display_name)] * (len(times) > 0)
            for rank, parts_s in times.iterrows():
                bars.append((len(group_lines) + len(bars), str(rank), parts_s[list(PARTS)].to_numpy()))
                alt_text.append(
                    f"{group.display_name}, {rank}: " + ", ".join(f"{p} {wording.seconds(parts_s[p])}" for p in PARTS)
                )
        if not bars:
            continue
        figure, axes = axes_of(1.0 + 0.27 * (len(group_lines) + len(bars)))
        rows, seconds = [row for row, _, _ in bars], np.array([parts_s for _, _, parts_s in bars])
        for part, length, left in zip(PARTS, seconds.T, (seconds.cumsum(1) - seconds).T):
            color, hatch = STYLES[part]
            axes.barh(rows, length, 0.75, left, label=part, color=color, hatch=hatch, edgecolor="white", linewidth=0)
        for row, name in group_lines:
            axes.annotate(name, (0.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        axes.set_yticks(rows, [rank for _, rank, _ in bars], fontsize=9)
        axes.set_ylim(len(group_lines) + len(bars) - 0.4, -0.6)
        axes.set_xlabel("seconds, mean over runs")
        axes.grid(False, axis="y")
        legend(figure, axes)
        yield ReportFigure(f"time-of-{ranks}-ranks", f"Where each rank's time went, {text}", alt_text, figure)
    columns = (*(f"{part}_s" for part in PARTS), "wall_s")
    body = [[group.title, *(wording.plain(group.mean(c)) for c in columns)] for group in analysis.groups if group.ended]
    table_heads = ["group", *PARTS, "seconds of the run"]
    yield ReportTable("Seconds of an average worker by activity", table_heads, body)
    yield "The remaining time of a rank is not part of any step record, such as reading data."
