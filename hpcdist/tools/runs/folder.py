"""Find the runs in folders, and read the plan of a comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcdist.errors import DataError
from hpcdist.records import parse_json, read_bounded

COMPARISON = "comparison.json"  # in the folder of a comparison or a sweep: its declaration and its runs
SWEEP = "sweep.json"  # beside it in the folder of a sweep: its space and its trials
TUNING = "tuning"  # beside it: the runs by which rates were chosen
FILES = ("run.json", "summary.json")  # one of them makes a folder a run's


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
    path = folder / COMPARISON
    try:
        found = parse_json(read_bounded(path), path, DataError)
        if not all(isinstance(run["folder"], str) for run in found["runs"]):
            raise TypeError("a run's folder is no text")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (DataError, LookupError, TypeError, OSError) as error:
        raise DataError(
            f"{path} must be what `hpcdist compare` writes; got {type(error).__name__}: {error}. Make it again."
        ) from None
