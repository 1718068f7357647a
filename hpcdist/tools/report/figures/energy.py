"""The energy of runs, per sample and to the target."""

from __future__ import annotations

from collections.abc import Iterator

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, RunGroup
from hpcdist.tools.report.figures.base import Part, ReportTable, dots

TITLE, ORDER = "Energy", 7


def draw(analysis: Analysis) -> Iterator[Part]:
    """Yield the energy per run and per sample, or the reason why it was not measured."""
    groups = [group for group in analysis.groups if group["joules"]]
    rows = [(group, group["joules"].values(), group.mean("joules"), "") for group in groups]
    yield from dots(analysis, "energy", "Energy of a run", "joules", rows, lambda v: f"{wording.number(v)} J")
    if groups:
        heads = ["group", "of a run", "per sample", "to the target", "runs measured"]
        yield ReportTable("Energy", heads, list(map(_row, groups)))
    reasons: dict[str, list[str]] = {}
    for group in analysis.groups:
        for result in group.ended:
            spent = result.run.summary.energy if result.run.summary else None
            if spent and (spent.joules is None or spent.not_measured):
                reasons.setdefault(spent.not_measured or "no reason is recorded", []).append(group.label)
    for reason, labels in reasons.items():
        groups_text = "" if not groups and len(reasons) == 1 else f" for {'; '.join(dict.fromkeys(labels))}"
        yield f"Not measured{groups_text}: {reason}."
    if groups:
        yield "Joules are counted from the run's start and include evaluations and checkpoints."


def _row(group: RunGroup) -> list[str]:
    means = group.mean("joules"), group.mean("joules_per_sample"), group.mean("joules_to_target")
    measured = f"{len(group['joules'])} of {len(group.ended)}"
    return [group.title, *(wording.plain(mean, " J") for mean in means), measured]
