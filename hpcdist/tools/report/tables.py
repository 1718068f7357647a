"""Put the findings into tables, and say of each section what was not measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import SIGNIFICANT, CellEvidence, Contrast, Findings
from hpcdist.tools.report.verdict import standing
from hpcdist.tools.statistics import Effect, interval

NONE = wording.NONE
STANDINGS = {
    "wins": "better",
    "loses": "worse",
    "mixed": "mixed",
    "alike": "within noise",
    "unknown": "not known: one seed",
}


@dataclass(frozen=True)
class ReportTable:
    """A table: a caption, the columns' heads, and rows whose first cell is their head."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


Contents = tuple[list[ReportTable], list[str]]  # tables and remarks


def of_section(name: str, findings: Findings) -> Contents:
    """Make the tables and remarks of a section of the page."""
    return SECTIONS[name](findings)


def facts(findings: Findings) -> list[tuple[str, str]]:
    """List what was asked, for the page's head."""
    evidence = findings.evidence
    better = "higher" if evidence.higher_is_better else "lower"
    starts = [run.start for run in evidence.runs if run.start]
    ended = sum(run.summary is not None for run in evidence.runs)
    found = [("metric", f"{evidence.metric} ({better} is better)")]
    found.append(("target", NONE if evidence.target is None else wording.value(evidence.metric, evidence.target)))
    if evidence.budget:
        found.append(("budget", ", ".join(f"{wording.number(v)} {unit}" for unit, v in evidence.budget.items())))
    found += [("held against", f"`{evidence.reference}`"), ("runs", f"{ended} of {len(evidence.runs)} ended")]
    if starts:
        days = sorted({start.started[:10] for start in starts})
        found.append(("made", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"))
    return found


def _label(cell: CellEvidence) -> str:
    return cell.label + ("" if cell.kind == "strategy" else f" [{cell.kind}]")


# --- the answer -------------------------------------------------------------------------------------------------------
def _answer(findings: Findings) -> Contents:
    metric, target = findings.evidence.metric, findings.evidence.target
    heads = ["cell", f"{metric} at the end"]
    if target is not None:
        heads += [f"seconds to {wording.value(metric, target)}", "seeds that reached it"]
    heads += ["seconds", "samples", "samples/s"]
    rows = []
    for cell in findings.cells:
        final = list(cell.final.values())
        row = [_label(cell), wording.mean(metric, interval(final)) if final else NONE]
        if target is not None:
            row += [_seconds_to_target(cell), f"{len(cell.seconds_to_target)} of {cell.tried}"]
        rate = cell.mean(lambda s: s.samples / s.wall_s if s.wall_s > 0 else None)
        row += [wording.plain(cell.mean(lambda s: s.wall_s)), wording.plain(cell.mean(lambda s: s.samples))]
        rows.append([*row, wording.plain(rate)])
    found = [ReportTable("All cells: means over their seeds, and 95 % intervals of the means", heads, rows)]
    if findings.contrasts:
        found.append(_contrasts(findings))
    remarks = [] if target is not None else ["Time to a target: not measured, because no target was set."]
    return found, remarks


def _seconds_to_target(cell: CellEvidence) -> str:
    """Write the geometric mean, as ratios of times are of these; only where no run is left out."""
    seconds = list(cell.seconds_to_target.values())
    if not seconds:
        return "not reached"
    if not cell.all_reached:
        return f"{wording.seconds(min(seconds))} at best"
    logs = interval([math.log(value) for value in seconds])
    text = wording.number(geometric_mean(seconds))
    if not logs.half > wording.ROUNDING:
        return text
    return f"{text} ({wording.number(math.exp(logs.low))} to {wording.number(math.exp(logs.high))})"


def _contrasts(findings: Findings) -> ReportTable:
    evidence = findings.evidence
    metric = evidence.metric
    unit = wording.gap_unit(metric)
    what = "times sooner at the target" if evidence.target is not None else "times faster per sample"
    heads = ["cell", "against", what, "p", f"difference in final {metric}{unit and f',{unit}'}", "p", "verdict"]
    rows = [
        [
            _label(contrast.cell),
            contrast.reference.label,
            NONE if contrast.sooner is None else wording.times(contrast.sooner),
            _p(contrast.p_sooner),
            NONE if contrast.better is None else "0" if contrast.same else _gap(metric, contrast.better),
            _p(contrast.p_better),
            _standing(contrast, evidence.higher_is_better),
        ]
        for contrast in findings.contrasts
    ]
    return ReportTable(
        f"Held against the reference: p after Holm's correction, significant below {SIGNIFICANT:g}", heads, rows
    )


def _standing(contrast: Contrast, higher: bool) -> str:
    found = standing(contrast, higher)
    several = len(contrast.cell.ended) > 1 or len(contrast.reference.ended) > 1
    return "not known" if found == "unknown" and several else STANDINGS[found]


def _p(p: float) -> str:
    return NONE if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"


def _gap(metric: str, found: Effect) -> str:
    text = wording.gap(metric, found.mean)
    if math.isnan(found.low):
        return text
    return f"{text} ({wording.gap(metric, found.low)} to {wording.gap(metric, found.high)})"


# --- the other sections -----------------------------------------------------------------------------------------------
def _curves(findings: Findings) -> Contents:
    missing = [cell.label for cell in findings.cells if cell.ended and not any(r.losses for r in cell.ended.values())]
    remarks = (
        [f"Training loss: not measured for {'; '.join(missing)}, whose steps were not recorded."] if missing else []
    )
    if not any(run.evaluations for run in findings.evidence.runs):
        remarks.append("The metric over time: not measured, because no run wrote evaluations.")
    return [], remarks


def _staleness(findings: Findings) -> Contents:
    cells = [cell for cell in findings.cells if cell.ended and cell.ranks > 1]
    none = [cell.label for cell in cells if not max(cell.staleness, default=0)]
    return [], [f"No gradient was stale: {'; '.join(none)}."] if none else []


def _time(findings: Findings) -> Contents:
    rows = [
        [
            _label(cell),
            *(wording.plain(cell.mean(lambda s, part=part: getattr(s.seconds, part))) for part in PARTS),
            wording.plain(cell.mean(lambda s: s.wall_s)),
        ]
        for cell in findings.cells
        if cell.ended
    ]
    heads = ["cell", *PARTS, "seconds of the run"]
    remark = "The rest of a rank's time is what no step records, such as reading data."
    return [ReportTable("Seconds of an average worker, by what it did", heads, rows)], [remark]


PARTS = ("computing", "communicating", "waiting")


def _scaling(findings: Findings) -> Contents:
    metric = findings.evidence.metric
    if not findings.scaling:
        return [], [
            "Scaling: not measured. It takes runs on one rank beside those on more, with the same batch of a worker "
            "(weak) or the same total batch (strong)."
        ]
    made = []
    for kind, how in (("strong", "the same total batch"), ("weak", "the same batch of each worker")):
        rows = [
            [
                _label(row.cell),
                row.base.name,
                wording.times(row.speedup),
                str(row.cell.ranks),
                wording.percent(row.speedup, row.cell.ranks),
                _final(metric, row.cell),
                _final(metric, row.base),
            ]
            for row in findings.scaling
            if row.kind == kind
        ]
        if rows:
            heads = ["cell", "one rank", "speed-up", "ideal", "efficiency", metric, f"{metric} on one rank"]
            made.append(ReportTable(f"{kind.capitalize()} scaling: {how}, seconds for as many samples", heads, rows))
    return made, [
        "Efficiency is T₁ / (p·Tₚ); on two ranks that is the percent of scaling, T₁ / (2·T₂). Parameter servers count "
        "as ranks."
    ]


def _final(metric: str, cell: CellEvidence) -> str:
    values = list(cell.final.values())
    return wording.mean(metric, interval(values)) if values else NONE


def _traffic(findings: Findings) -> Contents:
    cells = [cell for cell in findings.cells if cell.ended and cell.ranks > 1]
    rows = [
        [
            _label(cell),
            wording.mean_amount(cell.mean(lambda s: s.bytes_per_step)),
            wording.plain(cell.mean(lambda s: s.messages_per_step)),
            wording.mean_amount(cell.spent_to_target("bytes")),
        ]
        for cell in cells
    ]
    heads = ["cell", "bytes per step", "messages per step", "bytes to the target"]
    caption = "Sent and fetched by all ranks, per step of a worker"
    return ([ReportTable(caption, heads, rows)], []) if rows else ([], ["One rank sends nothing."])


def _energy(findings: Findings) -> Contents:
    rows, reasons = [], {}
    for cell in findings.cells:
        for run in cell.ended.values():
            spent = run.summary.energy
            if spent.joules is None or spent.not_measured:
                reasons.setdefault(spent.not_measured or "nobody says why", []).append(cell.label)
        spent = cell.mean(lambda s: s.energy.joules)
        if spent is not None:
            measured = len(cell.measure(lambda s: s.energy.joules))
            each = wording.plain(cell.mean(lambda s: s.joules_per_sample), " J")
            until = wording.plain(cell.spent_to_target("joules"), " J")
            rows.append([_label(cell), wording.plain(spent, " J"), each, until, f"{measured} of {len(cell.ended)}"])
    remarks = [
        f"Not measured{'' if not rows and len(reasons) == 1 else ' for ' + '; '.join(dict.fromkeys(labels))}: {reason}."
        for reason, labels in reasons.items()
    ]
    remarks += ["Joules are those since a run began, with its evaluations and checkpoints."] if rows else []
    heads = ["cell", "of a run", "per sample", "to the target", "runs measured"]
    return ([ReportTable("Energy", heads, rows)] if rows else []), remarks


def _runs(findings: Findings) -> Contents:
    evidence = findings.evidence
    made = []
    if findings.failures:
        rows = [
            [run.name, str(run.ranks), str(run.seed), str(run.folder), run.failure or ""] for run in findings.failures
        ]
        made.append(ReportTable("Runs without a result", ["run", "ranks", "seed", "folder", "what became of it"], rows))
    if evidence.settings:
        rows = [[_label(cell), *(_values(of, cell) for of in evidence.settings.values())] for cell in findings.cells]
        made.append(ReportTable("Settings that differ", ["cell", *evidence.settings], rows))
    made.append(_provenance(findings))
    remarks = [] if any(run.start for run in evidence.runs) else ["Settings, hosts, versions: not written down."]
    return made, remarks


def _values(of, cell: CellEvidence) -> str:
    return ", ".join(dict.fromkeys(of[run.folder] for run in cell.runs if run.folder in of)) or NONE


def _span(dates: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else NONE


def _provenance(findings: Findings) -> ReportTable:
    """Tell where and from what runs were made; what they have in common once."""
    rows = []
    for cell in findings.cells:
        starts = [run.start for run in cell.runs if run.start]

        def every(write: Callable, starts=starts) -> str:
            return "; ".join(sorted({write(start) for start in starts})) or NONE

        rows.append(
            [
                _label(cell),
                f"{len(cell.ended)} of {len(cell.runs)}",
                ", ".join(str(run.seed) for run in cell.runs),
                every(lambda start: ", ".join(dict.fromkeys(start.hosts))),
                every(lambda start: (start.commit or "none")[:10] + (" with changes" if start.dirty else "")),
                every(lambda start: ", ".join(f"{name} {v}" for name, v in start.versions.items() if v)),
                _span(sorted(start.started for start in starts)),
            ]
        )
    heads = ["cell", "runs that ended", "seeds", "hosts", "commit", "versions", "started"]
    return ReportTable("How the runs were made", heads, rows)


SECTIONS: dict[str, Callable[[Findings], Contents]] = {
    "answer": _answer,
    "curves": _curves,
    "staleness": _staleness,
    "time": _time,
    "scaling": _scaling,
    "traffic": _traffic,
    "energy": _energy,
    "runs": _runs,
}
