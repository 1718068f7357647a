"""Speed-up and efficiency over numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, ScalingRow
from hpcdist.tools.report.figures.base import INK, Part, ReportFigure, ReportTable, axes_of, legend, looks

TITLE, ORDER = "Scaling", 5
KINDS = {"strong": "the same total batch", "weak": "the same batch of each worker"}


def draw(analysis: Analysis) -> Iterator[Part]:
    if not analysis.scaling:
        yield (
            "Scaling: not measured. It takes runs on one rank beside those on more, with the same batch of a worker "
            "(weak) or the same total batch (strong)."
        )
        return
    metric = analysis.job.metric
    for kind, how in KINDS.items():
        rows = [row for row in analysis.scaling if row.kind == kind]
        if not rows:
            continue
        yield _figure(analysis, rows, f"{kind}-speed-up", f"Speed-up at {how}", "speed-up T₁ / Tₚ", 1)
        yield _figure(analysis, rows, f"{kind}-efficiency", f"Efficiency at {how}", "efficiency T₁ / (p·Tₚ)", 0)
        caption = f"{kind.capitalize()} scaling: {how}, seconds for as many samples"
        heads = ["runs of one kind", "one rank", "speed-up", "ideal", "efficiency", metric, f"{metric} on one rank"]
        yield ReportTable(caption, heads, [_row(row, metric) for row in rows])
    yield (
        "Efficiency is T₁ / (p·Tₚ); on two ranks that is the percent of scaling, T₁ / (2·T₂). Parameter servers count "
        "as ranks."
    )


def _row(row: ScalingRow, metric: str) -> list[str]:
    finals = [wording.mean(metric, one.final_mean) for one in (row.group, row.base)]
    ranks, share = row.group.ranks, wording.estimate(row.speedup.scaled(100 / row.group.ranks), unit=" %")
    return [row.group.title, row.base.name, wording.times(row.speedup), str(ranks), share, *finals]


def _figure(
    analysis: Analysis, rows: Sequence[ScalingRow], name: str, title: str, unit: str, power: int
) -> ReportFigure:
    """Draw measured beside ideal speed-up (power 1), or the efficiency, which is that over the ranks (power 0)."""
    figure, axes = axes_of(2.7)
    ranks = sorted({1, *(row.group.ranks for row in rows)})
    axes.plot(ranks, [p**power for p in ranks], color=INK, linewidth=0.9, linestyle=":", label="ideal")
    said = ["The dotted line is the ideal"]
    names = sorted({row.group.shown for row in rows})
    for number, of_name in enumerate(names):
        points = sorted((row for row in rows if row.group.shown == of_name), key=lambda row: row.group.ranks)
        p = np.array([row.group.ranks for row in points])
        beside = number - (len(names) - 1) / 2  # so that intervals do not hide each other
        x = p * 2 ** (0.06 * beside) if ranks[-1] > 8 else p + 0.02 * (ranks[-1] - 1) * beside
        found = [(row.speedup.mean, row.speedup.low, row.speedup.high) for row in points]
        mean, low, high = np.transpose(found) / p ** (1 - power)
        last = points[-1].group  # no speed-up without what was learnt
        ending = f" ({wording.mean(analysis.job.metric, last.final_mean)})" if last.final else ""
        look = looks(analysis)[last.name]
        axes.plot([1, *x], [1, *mean], label=f"{of_name}{ending}", **look._asdict())
        axes.vlines(x, low, high, color=look.color, linewidth=1)  # NaN, of one seed, is not drawn
        said.append(f"{of_name}{ending}: " + ", ".join(f"{value:.3g} on {n} ranks" for n, value in zip(p, mean)))
    axes.set(xlabel="ranks", ylabel=unit)
    if max(ranks) > 8:
        axes.set_xscale("log", base=2)
        if power:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.set_xticks(ranks, list(map(str, ranks)))
    axes.minorticks_off()
    top = max([p**power for p in ranks] + [row.speedup.mean / row.group.ranks ** (1 - power) for row in rows])
    axes.set_ylim(0 if axes.get_yscale() == "linear" else None, 1.25 * top)  # an interval may go on, of a few seeds
    legend(figure, axes)
    return ReportFigure(name, title + " (virtual)" * any(row.group.virtual for row in rows), said, figure)
