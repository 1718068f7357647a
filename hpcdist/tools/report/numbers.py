"""Every number of a report: a row per run, for CSV, JSON and pandas."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdist.errors import ConfigError
from hpcdist.records.json_values import finite
from hpcdist.tools.report.analysis import CellEvidence, Findings, analyse
from hpcdist.tools.report.read import Point, RunEvidence, read
from hpcdist.tools.report.verdict import Verdict
from hpcdist.tools.statistics import Interval, interval

if TYPE_CHECKING:
    import pandas

VERSION = 1  # of runs.json


def read_runs(folder: str | Path) -> pandas.DataFrame:
    """Read all runs of a folder into a pandas frame, a row each: those that failed, too. Needs the extra `plots`.

    Columns are the run's cell (`name`, `kind`, `ranks`, `virtual`), `seed`, `folder` and `failure`; its cost
    (`wall_s`, `samples`, `bytes_per_step`, ...); `metric.NAME` at the end; `time_to_target_s` and the like where a
    comparison has a target; and `setting.KEY` for the settings in which runs differ.

    Raises:
        ConfigError: there is no run, or pandas is not installed.
        DataError: a file is damaged.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            "pandas must be installed to read runs as a frame; got none. Run: pip install 'hpcdist[plots]'"
        ) from error
    return pandas.DataFrame(rows(analyse(read([Path(folder)]))))


def rows(findings: Findings) -> list[dict[str, Any]]:
    """Make the rows: each has the same keys."""
    found = [
        _row(findings, cell, run, cell.reached.get(seed))
        for cell in findings.cells
        for seed, run in [*cell.ended.items(), *((None, run) for run in cell.runs if run.summary is None)]
    ]
    keys = list(dict.fromkeys(key for row in found for key in row))
    return [{key: row.get(key) for key in keys} for row in found]


def _row(findings: Findings, cell: CellEvidence, run: RunEvidence, reached: Point | None) -> dict[str, Any]:
    evidence, summary, start = findings.evidence, run.summary, run.start
    row: dict[str, Any] = {
        "name": cell.name,
        "kind": cell.kind,
        "ranks": cell.ranks,
        "virtual": cell.virtual,
        "seed": run.seed,
        "folder": str(run.folder),
        "failure": run.failure,
    }
    if start is not None:
        row |= {"started": start.started, "ended": start.ended, "commit": start.commit, "dirty": start.dirty}
        row |= {"hosts": " ".join(dict.fromkeys(start.hosts))}
        row |= {f"version.{name}": version for name, version in start.versions.items()}
    if summary is not None:
        row |= {f"metric.{name}": value for name, value in summary.metrics.items()}
        if evidence.target is not None:
            row["time_to_target_s"] = None if reached is None else reached.seconds
            row["samples_to_target"] = None if reached is None else reached.samples
            row["bytes_to_target"] = None if reached is None else reached.bytes
            row["joules_to_target"] = None if reached is None else reached.joules
        same = ("strategy", "workers", "samples", "wall_s", "bytes_per_step", "messages_per_step", "dropped", "skipped")
        row |= {key: getattr(summary, key) for key in same}
        row |= {f"{key}_s": value for key, value in summary.seconds.model_dump().items()}
        row |= {"staleness_mean": summary.staleness.mean, "staleness_max": summary.staleness.max}
        row |= {"joules": summary.energy.joules, "joules_per_sample": summary.joules_per_sample}
    return row | {f"setting.{key}": of.get(run.folder) for key, of in evidence.settings.items()}


# --- files ------------------------------------------------------------------------------------------------------------
def write_csv(findings: Findings, path: Path) -> None:
    """Write a line per run."""
    found = rows(findings)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


def write_json(findings: Findings, verdict: Verdict, path: Path) -> None:
    """Write all numbers: runs with their curves, cells, contrasts, scaling, and the verdict."""
    evidence = findings.evidence
    content = {
        "version": VERSION,
        **{key: getattr(evidence, key) for key in ("title", "metric", "higher_is_better", "target", "budget")},
        "reference": evidence.reference,
        "verdict": asdict(verdict),
        "cells": [_cell(cell) for cell in findings.cells],
        "contrasts": [
            {
                "cell": contrast.cell.label,
                "reference": contrast.reference.label,
                "times_sooner": None if contrast.sooner is None else asdict(contrast.sooner),
                "times_sooner_p_corrected": contrast.p_sooner,
                "metric_difference": None if contrast.better is None else asdict(contrast.better),
                "metric_difference_p_corrected": contrast.p_better,
                "why_no_ratio": contrast.why,
            }
            for contrast in findings.contrasts
        ],
        "scaling": [
            {
                "kind": row.kind,
                "cell": row.cell.label,
                "base": row.base.label,
                "speedup": asdict(row.speedup),
                "efficiency": row.efficiency,
            }
            for row in findings.scaling
        ],
        "runs": rows(findings),
        "curves": {str(run.folder): _curves(run) for run in evidence.runs},
    }
    path.write_text(json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")


def _cell(cell: CellEvidence) -> dict[str, Any]:
    seconds = list(cell.seconds_to_target.values())
    final = list(cell.final.values())
    return {
        "label": cell.label,
        "name": cell.name,
        "kind": cell.kind,
        "ranks": cell.ranks,
        "virtual": cell.virtual,
        "runs": len(cell.runs),
        "ended": len(cell.ended),
        "reached": len(seconds),
        "final": None if not final else _interval(interval(final)),
        "seconds_to_target": None if not seconds else _interval(interval(seconds)),
        "staleness": cell.staleness,
        "seconds_by_rank": {rank: asdict(time) for rank, time in cell.times.items()},
    }


def _interval(found: Interval) -> dict[str, float]:
    return {"mean": found.mean, "low": found.low, "high": found.high}


def _curves(run: RunEvidence) -> dict[str, Any]:
    return {"losses": list(map(_point, run.losses)), "evaluations": list(map(_point, run.evaluations))}


def _point(point: Point) -> dict[str, Any]:
    return {"samples": point.samples, "seconds": point.seconds, "bytes": point.bytes, **point.values}
