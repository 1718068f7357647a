"""The energy of runs, per sample and to the target."""

from __future__ import annotations

from collections.abc import Iterator

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, Cell
from hpcdist.tools.report.figures.base import Part, ReportTable, dots

TITLE, ORDER = "Energy", 7


def draw(analysis: Analysis) -> Iterator[Part]:
    cells = [cell for cell in analysis.cells if cell["joules"]]
    found = [(cell, cell["joules"].values(), cell.mean("joules"), "") for cell in cells]
    yield from dots(analysis, "energy", "Energy of a run", "joules", found, lambda v: f"{wording.number(v)} J")
    if cells:
        heads = ["runs of one kind", "of a run", "per sample", "to the target", "runs measured"]
        yield ReportTable("Energy", heads, list(map(_row, cells)))
    reasons: dict[str, list[str]] = {}
    for cell in analysis.cells:
        for one in cell.ended:
            spent = one.run.summary.energy if one.run.summary else None
            if spent and (spent.joules is None or spent.not_measured):
                reasons.setdefault(spent.not_measured or "no reason is recorded", []).append(cell.label)
    for reason, labels in reasons.items():
        which = "" if not cells and len(reasons) == 1 else f" for {'; '.join(dict.fromkeys(labels))}"
        yield f"Not measured{which}: {reason}."
    if cells:
        yield "Joules are those since a run began, with its evaluations and checkpoints."


def _row(cell: Cell) -> list[str]:
    means = cell.mean("joules"), cell.mean("joules_per_sample"), cell.spent_to_target("joules")
    measured = f"{len(cell['joules'])} of {len(cell.ended)}"
    return [cell.title, *(wording.plain(mean, " J") for mean in means), measured]
