"""The metric at the end and the time to the target: of each cell, and against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcdist.tools.report import wording
from hpcdist.tools.report.figures.base import Part, ReportTable, dots
from hpcdist.tools.report.findings import SIGNIFICANT, Cell, Contrast, Findings
from hpcdist.tools.report.wording import NONE

TITLE, ORDER = "The answer in numbers", 1
STANDINGS = {"wins": "better", "loses": "worse", "mixed": "mixed", "alike": "within noise"}


def draw(findings: Findings) -> Iterator[Part]:
    evidence, metric = findings.evidence, findings.evidence.metric
    heads = ["runs of one kind", f"{metric} at the end"]
    if evidence.target is None:
        yield "Time to a target: not measured, because no target was set."
    else:
        target = wording.value(metric, evidence.target)
        heads += [f"seconds to {target}, geometric mean", "seeds that reached it"]
        reached = [(cell, cell.seconds_to_target.values(), "" if cell.all_reached else f"{_seeds(cell)} reached it")
                   for cell in findings.cells]  # fmt: skip
        title, unit = f"Seconds to {metric} {target}", "seconds of training, geometric mean"
        yield from dots(findings, "time-to-target", title, unit, reached, wording.seconds, geometric=True)
    scale, unit, most = (100, " %", 100) if wording.is_share(metric) else (1, "", math.inf)
    finals = [
        (cell, [scale * value for value in cell.final.values()], f"{cell.diverged} not finite" * bool(cell.diverged))
        for cell in findings.cells
        if cell.ended
    ]
    title, name = f"{wording.capital(metric)} at the end", f"{metric}-at-the-end"
    yield from dots(findings, name, title, metric + unit, finals, lambda value: f"{value:.4g}{unit}", most=most)
    rows = []
    for cell in findings.cells:
        spent = (cell.mean("wall_s"), cell.mean("samples"), cell.samples_per_s)
        to_target = []
        if evidence.target is not None:
            to_target = [wording.seconds_to_target(cell.seconds_to_target.values(), cell.tried), _seeds(cell)]
        rows.append([cell.title, wording.mean(metric, cell.final_mean), *to_target, *map(wording.plain, spent)])
    caption = "Means over their seeds, and 95 % intervals of the means"
    yield ReportTable(caption, [*heads, "seconds", "samples", "samples/s"], rows)
    if findings.contrasts:
        yield _contrasts(findings)


def _seeds(cell: Cell) -> str:
    return f"{len(cell.seconds_to_target)} of {cell.tried}"


def _contrasts(findings: Findings) -> ReportTable:
    evidence, metric = findings.evidence, findings.evidence.metric
    what = "times sooner at the target" if evidence.target is not None else "times faster per sample"
    unit = wording.gap_unit(metric)
    difference = f"difference in final {metric}{unit and f',{unit}'}"
    heads = ["runs of one kind", "against", what, "p", difference, "p", "verdict"]
    rows = [
        [
            contrast.cell.title,
            contrast.reference.label,
            NONE if contrast.sooner is None else wording.times(contrast.sooner),
            _p(contrast.p_sooner),
            _difference(metric, contrast),
            _p(contrast.p_better),
            STANDINGS.get(contrast.standing) or _unknown(contrast),
        ]
        for contrast in findings.contrasts
    ]
    caption = f"Held against the reference: p after Holm's correction, significant below {SIGNIFICANT:g}"
    return ReportTable(caption, heads, rows)


def _p(p: float) -> str:
    return NONE if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"


def _difference(metric: str, contrast: Contrast) -> str:
    found = contrast.better
    if found is None or contrast.same:
        return NONE if found is None else "0"
    return wording.gap(metric, found.mean) + ("" if math.isnan(found.low) else f" ({wording.gap_span(metric, found)})")


def _unknown(contrast: Contrast) -> str:
    several = len(contrast.cell.ended) > 1 or len(contrast.reference.ended) > 1
    return "not known" if several else "not known: one seed"
