"""Make the runs of a list that are missing, one at a time; what fails is written down, and the others go on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from hpcdist.errors import RunError
from hpcdist.tools.compare.making import Maker
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.runs import FAILURE, is_done


class Watch(Protocol):
    """See the runs come and go."""

    def begin(self, run: PlannedRun, folder: Path) -> None:
        """Note that a run begins."""

    def end(self, run: PlannedRun, folder: Path, failure: str | None) -> None:
        """Note that a run has ended; `failure` says why without a summary."""


def missing(runs: Sequence[PlannedRun], output: Path) -> list[PlannedRun]:
    """List the runs that have not ended well yet."""
    return [run for run in runs if not is_done(output / run.folder)]


def make_all(
    runs: Sequence[PlannedRun],
    output: Path,
    makers: Mapping[str, Maker],
    watch: Watch | None = None,
    workers: int = 1,
) -> list[PlannedRun]:
    """Make the runs that are missing, in their order; return those that failed.

    Args:
        makers: by the kind of run, or by the name of a baseline.
        workers: runs that are made at the same time, by threads.
    """
    left = missing(runs, output)
    if workers == 1:
        failures = [make_one(run, output, makers, watch) for run in left]
    else:
        threads = ThreadPoolExecutor(workers)
        try:
            made = [threads.submit(make_one, run, output, makers, watch) for run in left]
            failures = [one.result() for one in made]
        finally:  # also on an interruption, after which no run is to begin
            threads.shutdown(wait=False, cancel_futures=True)
    return [run for run, failure in zip(left, failures, strict=True) if failure is not None]


def prepare(run: PlannedRun, output: Path) -> Path:
    """Prepare the folder of a run that is to begin, and return it.

    A half-made run without checkpoints, or of a baseline, is removed: it is made anew.
    """
    folder = output / run.folder
    if run.kind == "baseline" or not (folder / "checkpoints").exists():
        shutil.rmtree(folder, ignore_errors=True)
    (folder / FAILURE).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_one(run: PlannedRun, output: Path, makers: Mapping[str, Maker], watch: Watch | None = None) -> str | None:
    """Make a run; return the reason where it failed, which its folder holds too."""
    folder = prepare(run, output)
    if watch is not None:
        watch.begin(run, folder)
    failure = None
    try:
        makers[run.name if run.kind == "baseline" else run.kind].make(run, folder)
    except RunError as error:
        failure = str(error)
        (folder / FAILURE).write_text(failure + "\n")
    if watch is not None:
        watch.end(run, folder, failure)
    return failure
