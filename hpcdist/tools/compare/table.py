"""The table of a comparison: what its runs have measured, a row for each name on each number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hpcdist.records import Summary
from hpcdist.tools.compare.plan import ComparedCell, Declaration, PlannedRun
from hpcdist.tools.report import wording
from hpcdist.tools.runs import Run
from hpcdist.tools.statistics import first_reaching, interval, ratio_of


class Measured:
    """The runs of one cell that have ended, with their summaries.

    Attributes:
        tried: number of runs that have begun, ended or not.
        to_target: of each run the seconds of training before the first evaluation that reaches the target, None where
            none does; empty without a target.
    """

    def __init__(self, declared: Declaration, runs: Sequence[Run], higher_is_better: bool):
        self.tried = sum(run.ended or run.start is not None for run in runs)
        ended = [(run, run.summary) for run in runs if run.summary is not None]
        self.summaries: list[Summary] = [summary for _, summary in ended]
        self.to_target: list[float | None] = []
        if declared.target is not None:
            for run, _ in ended:
                moments = ((one.seconds, one.metrics[declared.metric]) for one in run.evaluations)
                self.to_target.append(first_reaching(moments, declared.target, higher_is_better))

    def cost_s(self, declared: Declaration) -> dict[int, float]:
        """Return by seed the seconds to the target, or without one those of a sample; empty where a run lacks them."""
        values = self.to_target
        if declared.target is None:
            values = [found.wall_s / found.samples if found.samples else None for found in self.summaries]
        costs = {found.seed: value for found, value in zip(self.summaries, values, strict=True) if value}
        return costs if len(costs) == len(values) else {}


def rows(
    declared: Declaration,
    cells: Sequence[ComparedCell],
    runs: Sequence[PlannedRun],
    output: Path,
    higher_is_better: bool,
) -> list[dict[str, Any]]:
    """Make the table, with 95 % intervals over the seeds.

    On virtual ranks it also has staleness, bytes, and the speed-up over one rank: to the target, or else of samples
    per second.
    """
    found = []
    for cell in cells:
        folders = [output / run.folder for run in runs if (run.name, run.ranks) == (cell.name, cell.ranks)]
        found.append(Measured(declared, [Run(folder) for folder in folders], higher_is_better))
    table = [_row(declared, *pair) for pair in zip(cells, found, strict=True)]
    if declared.virtual is not None:
        least = min(cell.samples for cell in cells)  # of one rank's own batch
        costs = [measured.cost_s(declared) for measured in found]
        alone = next((cost for cell, cost in zip(cells, costs) if (cell.ranks, cell.samples) == (1, least)), {})
        for row, measured, cost in zip(table, found, costs, strict=True):
            if declared.seeds == 1:
                del row["seeds"]
            row |= _virtual(measured.summaries, cost, alone)
    return table


def mean_metric(found: Sequence[Summary | None], metric: str) -> float | None:
    """Average a metric over runs; None where one failed, or ended with a NaN."""
    values = [math.nan if one is None else one.metrics[metric] for one in found]
    return fmean(values) if all(map(math.isfinite, values)) else None


def _row(declared: Declaration, cell: ComparedCell, measured: Measured) -> dict[str, Any]:
    found, seeds = measured.summaries, declared.seeds
    values = [summary.metrics[declared.metric] for summary in found]
    row: dict[str, Any] = {"name": cell.name, "ranks": cell.ranks}
    row["seeds"] = str(seeds) if len(found) == seeds else f"{len(found)} of {seeds}"
    row[declared.metric] = f"{interval(values):.4f}" if values else "none"
    if declared.target is not None:
        row[f"s to {declared.target:g},\ngeometric mean"] = _times(measured)
    rates = [summary.samples / summary.wall_s for summary in found if summary.wall_s > 0]
    row["samples/s"] = f"{interval(rates):.0f}" if rates else "none"
    return row


def _times(measured: Measured) -> str:
    """Write the times of the runs that reach the target, and how many do where that is not all."""
    reached, tried = [seconds for seconds in measured.to_target if seconds is not None], measured.tried
    some = 0 < len(reached) < tried
    return wording.seconds_to_target(reached, tried) + f" ({len(reached)} of {tried})" * some


def _virtual(found: Sequence[Summary], cost_s: dict[int, float], alone_s: dict[int, float]) -> dict[str, Any]:
    """Return the columns of virtual ranks. `alone_s`: the costs by seed on one rank."""
    speed_up = "none"
    if alone_s and cost_s:
        ratio = ratio_of(alone_s, cost_s)
        speed_up, low, high = (f"{value:.2f}" for value in (ratio.mean, ratio.low, ratio.high))
        if ratio.low < ratio.high and low != high:  # the interval is known
            speed_up += f" ({low} to {high})"
    return {
        "speed-up": speed_up,
        "staleness\nmean": fmean(summary.staleness.mean for summary in found) if found else None,
        "max": max((summary.staleness.max for summary in found), default=None),
        "kB/step": fmean(summary.bytes_per_step / 1e3 for summary in found) if found else None,
    }
