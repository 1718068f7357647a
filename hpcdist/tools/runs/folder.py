"""Find the runs in folders, and read the plan of a comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.errors import DataError
from hpcdist.records import parse_json, read_bounded

COMPARISON = "comparison.json"  # in the folder of a comparison or a sweep: its declaration and its runs
SWEEP = "sweep.json"  # beside it in the folder of a sweep: its space and its trials
TUNING = "tuning"  # beside it: the runs by which rates were chosen
FILES = ("run.json", "summary.json")  # one of them makes a folder a run's


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Find the folders of runs, at any depth; without the runs by which a comparison has tuned its rates."""
    found: dict[Path, None] = {}
    for folder in folders:
        runs = []
        for where, below, files in os.walk(folder):
            if COMPARISON in files and TUNING in below:
                below.remove(TUNING)
            if not set(FILES).isdisjoint(files):
                runs.append(Path(where))
        found |= dict.fromkeys(sorted(runs))
    return list(found)


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
