"""Find the runs in folders, and read the plan of a comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat

from hpcdist.records import read_checked
from hpcdist.records.files import Count, PathText

COMPARISON = "comparison.json"  # in the folder of a comparison or a sweep: its declaration and its runs
SWEEP = "sweep.json"  # beside it in the folder of a sweep: its space and its trials
TUNING = "tuning"  # beside it: the runs by which rates were chosen
FILES = ("run.json", "summary.json")  # one of them makes a folder a run's


class _ListedRun(BaseModel):
    model_config = ConfigDict(extra="allow")

    folder: PathText
    name: str = ""
    kind: str = ""
    ranks: Count = 0
    seed: Count = 0


class _Comparison(BaseModel):
    """The types of the keys of `comparison.json` that tools read. Any other key may be there."""

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
    """Find the folders of runs, at any depth, each with the folder of its comparison, or None.

    Nothing within a run's folder is looked at, nor the runs by which a comparison has tuned its rates.
    """
    return {run: comparison for folder in folders for run, comparison in _walk(folder, None)}


def _walk(folder: Path, comparison: Path | None) -> Iterator[tuple[Path, Path | None]]:
    try:
        with os.scandir(folder) as entries:
            below = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError:  # it is no folder, or another user's
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
    """Read the declaration and the planned runs of a comparison; None where the folder holds none.

    Raises:
        DataError: the file is damaged.
    """
    found = read_checked(folder / COMPARISON, _Comparison, "be written by `hpcdist compare`", "Run it again.")
    return None if found is None else found.model_dump(exclude_unset=True)
