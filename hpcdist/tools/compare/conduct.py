"""Make all runs of a comparison or a sweep that are missing, and show what they have measured."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcdist.records import claimed
from hpcdist.tools import console
from hpcdist.tools.compare import results
from hpcdist.tools.compare.comparison import Comparison
from hpcdist.tools.compare.course import FAILURE, make_all, missing
from hpcdist.tools.compare.display import shown
from hpcdist.tools.compare.making import Maker
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.compare.sweep import Sweep


def make(
    comparison: Comparison,
    makers: Mapping[str, Maker],
    workers: int = 1,
    rows: Callable[..., list[dict[str, Any]]] | None = None,
) -> bool:
    """Make all runs that are missing, and show what they have measured; tell whether one failed.

    Args:
        workers: runs that are made at the same time.
        rows: makes the table, from the same arguments as `results.table`.
    """
    output, declared = comparison.output, comparison.declared
    for sentence in comparison.left_out:
        console.note(sentence)
    command = "compare" if declared.virtual is None else "simulate"
    with claimed(output), interruptible(f"`hpcdist {command} --output {output}` goes on with it"):
        planned = comparison.plan()
        if declared.tune:
            cells = len({(cell.rate_key, cell.ranks) for cell in comparison.cells})
            with shown("learning rates", cells * declared.tune) as display:
                chosen = comparison.tune(makers, display)
            for one in chosen:
                print(one)
            planned = comparison.plan(chosen)
        left = missing(planned, output)
        if len(left) < len(planned):
            console.note(f"{len(planned) - len(left)} of {len(planned)} runs are there already")
        with shown("runs", len(left)) as display:
            failed = make_all(planned, output, makers, display, workers)
        show(comparison, planned, failed, rows or results.table)
    return bool(failed)


def make_sweep(sweep: Sweep, makers: Mapping[str, Maker]) -> bool:
    """Make all runs of a sweep that are missing, and show its points; tell whether one failed."""
    output = sweep.output
    with claimed(output), interruptible(f"`hpcdist sweep --output {output}` goes on with it"):
        with shown("runs", sweep.count()) as display:
            failed = sweep.make(makers, display)
        console.rows(f"{sweep.declared.job}: the best settings first", sweep.table())
        _end(output, failed)
    return bool(failed)


def show(
    comparison: Comparison,
    planned: Sequence[PlannedRun],
    failed: Sequence[PlannedRun],
    rows: Callable[..., list[dict[str, Any]]],
) -> None:
    """Show the table, and end."""
    declared = comparison.declared
    console.rows(
        f"{declared.job}: {'virtual seconds, ' if declared.virtual else ''}means and 95 % intervals over the seeds",
        rows(comparison, planned),
    )
    _end(comparison.output, failed)


def _end(output: Path, failed: Sequence[PlannedRun]) -> None:
    """Name the runs that failed, and write the report."""
    for run in failed:
        console.error(f"{output / run.folder} failed: see {FAILURE} there. The same command makes it again.")
    if find_spec("matplotlib") is None:
        console.note(f"all runs are in {output}; a report needs matplotlib: pip install 'hpcdist[plots]'")
        return
    from hpcdist.tools import report  # needs matplotlib

    console.note(f"all runs are in {output}; the report is {report.write(output)}")


@contextmanager
def interruptible(going_on: str) -> Iterator[None]:
    """Take SIGTERM and SIGHUP for Ctrl-C, and say how to go on."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        console.note(going_on)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
