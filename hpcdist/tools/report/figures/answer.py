"""Final metric and time to the target: of each group, and against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import SIGNIFICANT, Analysis, RunGroup
from hpcdist.tools.report.figures.base import Part, ReportTable, dots
from hpcdist.tools.report.wording import NONE
from hpcdist.tools.statistics import MIN_SEEDS

TITLE, ORDER = "The answer in numbers", 1
OUTCOMES = {"wins": "better", "loses": "worse", "mixed": "mixed", "tied": "within noise"}


def draw(analysis: Analysis) -> Iterator[Part]:
    """Yield figures of the time to the target and of the final metric, and tables of both."""
    job, metric = analysis.job, analysis.job.metric
    heads = ["group", f"{metric} at the end"]
    if job.target is None:
        yield "Time to a target: not measured, because no target was set."
    else:
        target = wording.value(metric, job.target)
        heads += [f"seconds to {target}, geometric mean", "seeds that reached it"]
        reached = [
            (group, group.seconds_to_target.values(), group.mean_seconds_to_target,
             "" if group.all_reached else f"{_seeds(group)} reached it")
            for group in analysis.groups
        ]  # fmt: skip
        title, unit = f"Seconds to {metric} {target}", "seconds of training, geometric mean"
        yield from dots(analysis, "time-to-target", title, unit, reached, wording.seconds)
    scale, unit, high = (100, " %", 100) if wording.is_share(metric) else (1, "", math.inf)
    finals = [
        (group, [scale * value for value in group.final.values()], group.final_mean and group.final_mean.scaled(scale),
         f"{group.diverged} not finite" * bool(group.diverged))
        for group in analysis.groups
        if group.ended
    ]  # fmt: skip
    title, name = f"{wording.capital(metric)} at the end", f"{metric}-at-the-end"
    yield from dots(analysis, name, title, metric + unit, finals, lambda value: f"{value:.4g}{unit}", high=high)
    rows = []
    for group in analysis.groups:
        spent = (group.mean("wall_s"), group.mean("samples"), group.samples_per_s)
        to_target = []
        if job.target is not None:
            to_target = [wording.seconds_to_target(group.seconds_to_target.values(), group.n_started), _seeds(group)]
        rows.append([group.title, wording.mean(metric, group.final_mean), *to_target, *map(wording.plain, spent)])
    caption = "Means over seeds, with their 95 % intervals"
    yield ReportTable(caption, [*heads, "seconds", "samples", "samples/s"], rows)
    if analysis.contrasts:
        yield _contrasts(analysis)


def _seeds(group: RunGroup) -> str:
    return f"{len(group.seconds_to_target)} of {group.n_started}"


def _contrasts(analysis: Analysis) -> ReportTable:
    """Return the table of each group against its reference."""
    metric = analysis.job.metric
    head = "times sooner at the target" if analysis.job.has_reached else "times faster per sample"
    heads = ["group", "against", head, "p", f"difference in final {metric}{', points' * wording.is_share(metric)}",
             "p", "verdict"]  # fmt: skip
    rows = []
    for c in analysis.contrasts:
        speedup, difference = wording.times(c.speedup), wording.gap_of(metric, c.difference, is_same=c.same)
        has_seeds = max(len(c.group.ended), len(c.reference.ended)) >= MIN_SEEDS
        outcome = OUTCOMES.get(c.outcome(), "not known" + ": too few seeds" * (not has_seeds))
        rows.append(
            [c.group.title, c.reference.label, speedup, _p(c.p_speedup), difference, _p(c.p_difference), outcome]
        )
    caption = f"Compared with the reference: p after Holm's correction, significant below {SIGNIFICANT:g}"
    return ReportTable(caption, heads, rows)


def _p(p: float) -> str:
    return NONE if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"
