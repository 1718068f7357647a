"""Read what the runs of a comparison have measured: a row for each name on each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.records import load_summary, read_evaluations
from hpcdist.tools.compare.comparison import Comparison
from hpcdist.tools.compare.course import is_done
from hpcdist.tools.compare.plan import ComparedCell, PlannedRun
from hpcdist.tools.statistics import first_reaching, interval


def table(comparison: Comparison, planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """Make a table, a row for each cell, with 95 % intervals over the seeds."""
    return [_row(comparison, cell, planned) for cell in comparison.cells]


def _row(comparison: Comparison, cell: ComparedCell, planned: Sequence[PlannedRun]) -> dict[str, Any]:
    declared, folders = comparison.declared, ended(comparison, cell, planned)
    summaries = [load_summary(folder) for folder in folders]
    values = [found.metrics[declared.metric] for found in summaries]
    row: dict[str, Any] = {"name": cell.name, "ranks": cell.ranks}
    seeds = declared.seeds
    row["seeds"] = str(seeds) if len(folders) == seeds else f"{len(folders)} of {seeds}"
    row[declared.metric] = f"{interval(values):.4f}" if values else "none"
    if declared.target is not None:
        reached = [time_to_target(comparison, folder) for folder in folders]
        row[f"s to {declared.target:g}"] = _times(reached)
    rates = [found.samples / found.wall_s for found in summaries if found.wall_s > 0]
    row["samples/s"] = f"{interval(rates):.0f}" if rates else "none"
    return row


def ended(comparison: Comparison, cell: ComparedCell, planned: Sequence[PlannedRun]) -> list[Path]:
    """List the folders of a cell's runs that have ended well."""
    of_cell = [comparison.output / run.folder for run in planned if (run.name, run.ranks) == (cell.name, cell.ranks)]
    return [folder for folder in of_cell if is_done(folder)]


def time_to_target(comparison: Comparison, folder: Path) -> float | None:
    """Return the seconds of training before the first evaluation that reaches the target; None where none does."""
    declared = comparison.declared
    moments = ((one.seconds, one.metrics[declared.metric]) for one in read_evaluations(folder))
    return first_reaching(moments, declared.target, comparison.higher_is_better)


def _times(reached: Sequence[float | None]) -> str:
    """Write the times of the runs that reach the target, and how many do where that is not all."""
    times = [seconds for seconds in reached if seconds is not None]
    if not times:
        return "not reached"
    return f"{interval(times):.2f}{'' if len(times) == len(reached) else f' ({len(times)} of {len(reached)})'}"
