"""List runs from their small files, never from step records; read and write tags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import DataError
from hpcdist.records import read_checked, replace_durably
from hpcdist.records.run import seconds_since
from hpcdist.tools.runs.run import Outcome, Run

TAGS = "tags.json"  # in a run's folder; training never opens it: no lock is needed
ListedState = Literal["running", Outcome, "damaged"]


@dataclass(frozen=True)
class ListedRun:
    """A run in a list.

    Attributes:
        age_s: seconds since its first start; None: unknown.
        time_s: running time, the sum over all starts without those that were killed; None if all were.
        metrics: final, or of the last evaluation.
        comparison: folder of the comparison or sweep that it belongs to.
        settings: of its newest start.
        damage: why a file could not be read.
    """

    folder: str
    state: ListedState
    job: str
    strategy: str
    ranks: int
    age_s: float | None
    time_s: float | None
    metrics: dict[str, float]
    tags: list[str]
    comparison: str | None
    settings: dict[str, Any]
    damage: str | None = None


def read_listed(folder: Path, comparison: Path | None = None) -> ListedRun:
    """Read a run for a list; with a damaged file it has the state `damaged`. `comparison`: folder of the run's."""
    comparison_path = None if comparison is None else str(comparison)
    try:
        run, tags = Run(folder), read_tags(folder)
    except DataError as error:
        return ListedRun(str(folder), "damaged", "", "", 0, None, None, {}, [], comparison_path, {}, str(error))
    record, summary = run.record, run.summary
    state: ListedState = run.outcome or "running"
    starts = [] if record is None else [record, *record.resumed]
    # Not those that were killed.
    known = [start for start in starts if start.ended or (state == "running" and start is starts[-1])]
    newest, last = run.start or summary, summary or (run.evaluations[-1] if run.evaluations else None)
    return ListedRun(
        folder=str(folder),
        state=state,
        job="" if record is None else Path(record.job.path).stem,
        strategy=run.strategy,
        ranks=0 if newest is None else newest.ranks,
        age_s=None if record is None else seconds_since(record.started),
        time_s=sum(start.took_s for start in known) if known else None,
        metrics={} if last is None else last.metrics,
        tags=tags,
        comparison=comparison_path,
        settings=run.settings,
    )


# --- tags -------------------------------------------------------------------------------------------------------------
def read_tags(folder: Path) -> list[str]:
    """Read the tags of a run, sorted; raise DataError if the file is damaged."""
    stored = read_checked(folder / TAGS, list[str], "be a list of words", "Remove it, and tag the run again.")
    return sorted(stored or ())


def write_tags(folder: Path, tags: set[str]) -> None:
    replace_durably(folder / TAGS, f"{json.dumps(sorted(tags), ensure_ascii=False)}\n".encode())
