"""Show what runs on virtual ranks have measured: virtual seconds, staleness, bytes, and the speed-up over one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hpcdist.records import Summary, load_summary
from hpcdist.study.comparison import results
from hpcdist.study.comparison.comparison import Comparison
from hpcdist.study.comparison.plan import ComparedCell, PlannedRun


def table(comparison: Comparison, planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """Make a table, a row for each cell. The speed-up is to the target, or else of samples per second."""
    rows, cells = results.table(comparison, planned), comparison.cells
    folders = [results.ended(comparison, cell, planned) for cell in cells]
    measured = [[load_summary(folder) for folder in of_cell] for of_cell in folders]
    costs = [_cost_s(comparison, *of_cell) for of_cell in zip(folders, measured, strict=True)]
    alone_s = next((cost for cell, cost in zip(cells, costs) if cell.ranks == 1 and _own_batch(cell, cells)), None)
    for row, summaries, cost in zip(rows, measured, costs, strict=True):
        if comparison.declared.seeds == 1:
            del row["seeds"]
        row["speed-up"] = f"{alone_s / cost:.2f}" if alone_s and cost else "none"
        row["staleness\nmean"] = _mean(summary.staleness.mean for summary in summaries)
        row["max"] = max((summary.staleness.max for summary in summaries), default=None)
        row["kB/step"] = _mean(summary.bytes_per_step / 1e3 for summary in summaries)
    return rows


def _own_batch(cell: ComparedCell, cells: Sequence[ComparedCell]) -> bool:
    """Tell whether a serial cell has the batch of one rank, the smallest."""
    return cell.samples == min(other.samples for other in cells)


def _cost_s(comparison: Comparison, folders: Sequence[Path], summaries: Sequence[Summary]) -> float | None:
    """Average the seconds to the target, or without one those of a sample; None where a run does not get there."""
    if comparison.declared.target is None:
        values = [found.wall_s / found.samples for found in summaries if found.samples]
    else:
        reached = [results.time_to_target(comparison, folder) for folder in folders]
        values = [seconds for seconds in reached if seconds is not None]
    return fmean(values) if values and len(values) == len(folders) else None


def _mean(values: Any) -> float | None:
    known = list(values)
    return fmean(known) if known else None
