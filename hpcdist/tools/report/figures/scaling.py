"""Speedup and efficiency over numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, ScalingRow
from hpcdist.tools.report.figures.base import INK, Part, ReportFigure, ReportTable, axes_of, legend, line_styles

TITLE, ORDER = "Scaling", 5
KINDS = {"strong": "the same total batch", "weak": "the same batch of each worker"}


def draw(analysis: Analysis) -> Iterator[Part]:
    """Yield figures and tables of weak and strong scaling."""
    if not analysis.scaling:
        yield (
            "Scaling: not measured. It needs runs on one rank and on more, with the same batch of a worker (weak) or "
            "the same total batch (strong)."
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
        heads = ["group", "one rank", "speed-up", "ideal", "efficiency", metric, f"{metric} on one rank"]
        yield ReportTable(caption, heads, [_row(row, metric) for row in rows])
    yield (
        "Efficiency is T₁ / (p·Tₚ); on two ranks that is the percent of scaling, T₁ / (2·T₂). Parameter servers count "
        "as ranks."
    )


def _row(row: ScalingRow, metric: str) -> list[str]:
    finals = [wording.mean(metric, end.final_mean) for end in (row.group, row.base)]
    ranks, share = row.group.ranks, wording.estimate(row.speedup.scaled(100 / row.group.ranks), unit=" %")
    return [row.group.title, row.base.name, wording.times(row.speedup), str(ranks), share, *finals]


def _figure(
    analysis: Analysis, rows: Sequence[ScalingRow], name: str, title: str, unit: str, power: int
) -> ReportFigure:
    """Plot speedup (power 1), or efficiency, which is speedup / ranks (power 0), and the ideal, ranks^power."""
    figure, axes = axes_of(2.7)
    ranks = sorted({1, *(row.group.ranks for row in rows)})
    axes.plot(ranks, [p**power for p in ranks], color=INK, linewidth=0.9, linestyle=":", label="ideal")
    alt_text = ["The dotted line is the ideal"]
    names = sorted({row.group.display_name for row in rows})
    for number, of_name in enumerate(names):
        points = sorted((row for row in rows if row.group.display_name == of_name), key=lambda row: row.group.ranks)
        p = np.array([row.group.ranks for row in points])
        shift = number - (len(names) - 1) / 2  # so that intervals don't overlap
        x = p * 2 ** (0.06 * shift) if ranks[-1] > 8 else p + 0.02 * (ranks[-1] - 1) * shift
        speedups = [(row.speedup.mean, row.speedup.low, row.speedup.high) for row in points]
        mean, low, high = np.transpose(speedups) / p ** (1 - power)
        last = points[-1].group  # never a speedup without the metric
        ending = f" ({wording.mean(analysis.job.metric, last.final_mean)})" if last.final else ""
        style = line_styles(analysis)[last.name]
        axes.plot([1, *x], [1, *mean], label=f"{of_name}{ending}", **style._asdict())
        axes.vlines(x, low, high, color=style.color, linewidth=1)  # NaN (one seed) is not drawn
        alt_text.append(f"{of_name}{ending}: " + ", ".join(f"{value:.3g} on {n} ranks" for n, value in zip(p, mean)))
    axes.set(xlabel="ranks", ylabel=unit)
    if max(ranks) > 8:
        axes.set_xscale("log", base=2)
        if power:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.set_xticks(ranks, list(map(str, ranks)))
    axes.minorticks_off()
    top = max([p**power for p in ranks] + [row.speedup.mean / row.group.ranks ** (1 - power) for row in rows])
    axes.set_ylim(0 if axes.get_yscale() == "linear" else None, 1.25 * top)  # wide intervals are clipped
    legend(figure, axes)
    return ReportFigure(name, title + " (virtual)" * any(row.group.virtual for row in rows), alt_text, figure)
