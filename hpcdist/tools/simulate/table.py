"""Show what runs on virtual ranks have measured: virtual seconds, staleness, bytes, and the speed-up over one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hpcdist.records import Summary, load_summary
from hpcdist.tools.compare import results
from hpcdist.tools.compare.comparison import Comparison
from hpcdist.tools.compare.plan import ComparedCell, PlannedRun
from hpcdist.tools.statistics import Effect, ratio_of


def table(comparison: Comparison, planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """Make a table, a row for each cell. The speed-up is to the target, or else of samples per second."""
    rows, cells = results.table(comparison, planned), comparison.cells
    folders = [results.ended(comparison, cell, planned) for cell in cells]
    measured = [[load_summary(folder) for folder in of_cell] for of_cell in folders]
    costs = [_cost_s(comparison, *of_cell) for of_cell in zip(folders, measured, strict=True)]
    alone_s = next((cost for cell, cost in zip(cells, costs) if cell.ranks == 1 and _own_batch(cell, cells)), {})
    for row, summaries, cost in zip(rows, measured, costs, strict=True):
        if comparison.declared.seeds == 1:
            del row["seeds"]
        row["speed-up"] = _speed_up(ratio_of(alone_s, cost)) if alone_s and cost else "none"
        row["staleness\nmean"] = _mean(summary.staleness.mean for summary in summaries)
        row["max"] = max((summary.staleness.max for summary in summaries), default=None)
        row["kB/step"] = _mean(summary.bytes_per_step / 1e3 for summary in summaries)
    return rows


def _own_batch(cell: ComparedCell, cells: Sequence[ComparedCell]) -> bool:
    """Tell whether a serial cell has the batch of one rank, the smallest."""
    return cell.samples == min(other.samples for other in cells)


def _cost_s(comparison: Comparison, folders: Sequence[Path], summaries: Sequence[Summary]) -> dict[int, float]:
    """Return by seed the seconds to the target, or without one those of a sample; empty where a run lacks them."""
    if comparison.declared.target is None:
        values = [found.wall_s / found.samples if found.samples else None for found in summaries]
    else:
        values = [results.time_to_target(comparison, folder) for folder in folders]
    costs = {found.seed: value for found, value in zip(summaries, values, strict=True) if value}
    return costs if len(costs) == len(folders) else {}


def _speed_up(found: Effect) -> str:
    """Write a speed-up, with its interval where that is known and not none."""
    text, low, high = (f"{value:.2f}" for value in (found.mean, found.low, found.high))
    return f"{text} ({low} to {high})" if found.low < found.high and low != high else text


def _mean(values: Any) -> float | None:
    known = list(values)
    return fmean(known) if known else None
