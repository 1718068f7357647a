"""Find the runs in folders; read the plan of a comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat

from hpcdist.records import read_checked
from hpcdist.records.files import Count, PathText

COMPARISON = "comparison.json"  # in the folder of a comparison or sweep: its settings and runs
SWEEP = "sweep.json"  # in the folder of a sweep: its search space and trials
TUNING = "tuning"  # subfolder: runs of the search for learning rates
FILES = ("run.json", "summary.json")  # a folder with one of these is a run's


class _ListedRun(BaseModel):
    model_config = ConfigDict(extra="allow")

    folder: PathText
    name: str = ""
    kind: str = ""
    ranks: Count = 0
    seed: Count = 0


class _Comparison(BaseModel):
    """Types of the keys of `comparison.json` that tools read; other keys are allowed."""

    model_config = ConfigDict(extra="allow")

    job: str = ""
    metric: str = ""
    higher_is_better: bool = False
    target: FiniteFloat | None = None
    budget: dict[str, int | FiniteFloat] | None = None
    reference: str | None = None
    tuning: dict[str, Any] | None = None
    runs: list[_ListedRun]


def find_runs(folders: Sequence[Path]) -> dict[Path, Path | None]:
    """Find the folders of runs at any depth; map each to the folder of its comparison, or None.

    Folders inside a run's folder, and the runs of a search for learning rates, are skipped.
    """
    return {run: comparison for folder in folders for run, comparison in _walk(folder, None)}


def _walk(folder: Path, comparison: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """Yield the runs below a folder, each with its comparison's folder or None."""
    try:
        with os.scandir(folder) as entries:
            below = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}  # name: is it a folder?
    except OSError:  # no folder, or not readable
        return
    if any(name in below for name in FILES):
        yield folder, comparison
        return
    if COMPARISON in below:
        comparison = folder
    for name in sorted(below):
        if below[name] and not (comparison == folder and name == TUNING):
            yield from _walk(folder / name, comparison)


def read_comparison(folder: Path) -> dict[str, Any] | None:
    """Read `comparison.json` in a folder; None if it is missing. Raises DataError if the file is damaged."""
    content = read_checked(folder / COMPARISON, _Comparison, "be written by `hpcdist compare`", "Run it again.")
    return None if content is None else content.model_dump(exclude_unset=True)
