"""Make the runs of a plan that are missing; a run that fails is written down, and the others go on."""

from __future__ import annotations

import abc
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcdist.errors import RunError
from hpcdist.records import claimed
from hpcdist.tools import console
from hpcdist.tools.compare import display
from hpcdist.tools.compare.launchers import Launcher
from hpcdist.tools.compare.plan import PlannedRun, RunDeclaration
from hpcdist.tools.runs import FAILURE, Run, is_done


class Runner:
    """Make runs in the folder of their plan, each once.

    Args:
        output: the folder.
        launchers: by the kind of run, or by the name of a baseline.
        workers: runs that are made at the same time, by threads.
    """

    def __init__(self, output: Path, launchers: Mapping[str, Launcher], workers: int = 1):
        self.output, self._launchers, self._workers = output, launchers, workers
        self._display: display.RunsDisplay | None = None

    @contextmanager
    def shown(self, title: str, total: int) -> Iterator[None]:
        """Show the runs that are made in the context, of which there are to be so many."""
        with display.shown(title, total) as self._display:
            yield
        self._display = None

    def run_all(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Make the runs that are missing, in their order; return those that failed."""
        left = missing(runs, self.output)
        if min(self._workers, len(left)) <= 1:
            ended = [self._run(run) for run in left]
        else:
            threads = ThreadPoolExecutor(self._workers)
            try:
                ended = list(threads.map(self._run, left))
            finally:  # also on an interruption, after which no run is to begin
                threads.shutdown(wait=False, cancel_futures=True)
        return [run for run, well in zip(left, ended, strict=True) if not well]

    def _run(self, run: PlannedRun) -> bool:
        """Make a run; tell whether it ended well. If not, its folder says why."""
        folder, failure = prepare(run, self.output), None
        if self._display is not None:
            self._display.begin(run, folder)
        try:
            self._launchers[run.name if run.kind == "baseline" else run.kind].make(run, folder)
        except RunError as error:
            failure = str(error)
            (folder / FAILURE).write_text(failure + "\n")
        if self._display is not None:
            self._display.end(run, folder, failure)
        return failure is None


def missing(runs: Sequence[PlannedRun], output: Path) -> list[PlannedRun]:
    """List the runs that have not ended well yet, or not with as many steps as they are to have."""

    def ended(run: PlannedRun) -> bool:
        folder = output / run.folder
        return is_done(folder) and (not run.steps or Run(folder).evaluations[-1].step >= run.steps)

    return [run for run in runs if not ended(run)]


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


# --- a whole plan, for a command --------------------------------------------------------------------------------------
class RunPlan(abc.ABC):
    """A comparison or a sweep, in its folder.

    Attributes:
        command: of hpcdist, which goes on with it.
        left_out: sentences about what can't be run.
        title: of its table.
    """

    declared: RunDeclaration
    output: Path
    command: str
    left_out: Sequence[str]
    title: str

    @abc.abstractmethod
    def make(self, runner: Runner) -> list[PlannedRun]:
        """Make all runs that are missing; return those that failed."""

    @abc.abstractmethod
    def table(self) -> list[dict[str, Any]]:
        """Make a table of what the runs that have ended have measured."""


def make(plan: RunPlan, launchers: Mapping[str, Launcher], workers: int = 1) -> bool:
    """Make all runs of a plan that are missing, and show what they have measured; tell whether one failed.

    Args:
        launchers, workers: see `Runner`.
    """
    for sentence in plan.left_out:
        console.note(sentence)
    with claimed(plan.output), interruptible(f"`hpcdist {plan.command} --output {plan.output}` goes on with it"):
        failed = plan.make(Runner(plan.output, launchers, workers))
        show(plan, failed)
    return bool(failed)


def show(plan: RunPlan, failed: Sequence[PlannedRun]) -> None:
    """Show the table, name the runs that failed, and write the report."""
    console.rows(plan.title, plan.table())
    for run in failed:
        console.error(f"{plan.output / run.folder} failed: see {FAILURE} there. The same command makes it again.")
    if find_spec("matplotlib") is None:
        console.note(f"all runs are in {plan.output}; a report needs matplotlib: pip install 'hpcdist[plots]'")
        return
    from hpcdist.tools import report  # needs matplotlib

    console.note(f"all runs are in {plan.output}; the report is {report.write(plan.output)}")


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
