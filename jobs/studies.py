"""What the studies among the jobs share."""

from __future__ import annotations

import csv
import hashlib
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

import hpcdist
from hpcdist import console
from hpcdist.study import Run, run_all


def run_with_progress(work: Callable, path: Path, workers: int, title: str, wanted: list[dict]) -> list[Run]:
    """`run_all` with a bar on a terminal, or else a line after every tenth of the runs."""
    columns = (f"{title:<12}", BarColumn(), MofNCompleteColumn(), "runs", TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        bar, started_s = progress.add_task(title, total=len(wanted)), time.monotonic()

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)
            if progress.disable and done and done * 10 // total > (done - 1) * 10 // total:
                console.note(f"{title}: {done} of {total} runs, {time.monotonic() - started_s:.0f} s")

        return run_all(work, wanted, path, workers=workers, show=show)


@cache
def code() -> str:
    """A checksum of the library's source: of what every figure depends on."""
    sha = hashlib.sha256()
    for path in sorted(Path(hpcdist.__file__).parent.rglob("*.py")):
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
