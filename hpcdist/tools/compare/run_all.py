"""Make the runs of an experiment that are missing, and show them; one that fails is written down, the others go on."""

from __future__ import annotations

import abc
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdist.errors import RunError
from hpcdist.records import claimed, load_summary
from hpcdist.tools import console, report
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.launchers import Launcher
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.compare.trained import TrainedJob, TrainedScript
from hpcdist.tools.report.wording import count
from hpcdist.tools.runs import COMPARISON, FAILURE, Run, is_done

if TYPE_CHECKING:
    from pandas import DataFrame

REFRESHES_S = 1.0  # how often the display reads the files of the runs under way
MOST_LINES = 8  # of runs that are under way at the same time; the others are counted


class Runner:
    """Make runs in the folder of their plan, each once.

    Args:
        output: the folder.
        launcher: makes each.
        workers: runs that are made at the same time, by threads.
    """

    def __init__(self, output: Path, launcher: Launcher, workers: int = 1):
        self.output, self._launcher, self._workers = output, launcher, workers
        self._display: RunsDisplay | None = None

    @contextmanager
    def shown(self, title: str, total: int) -> Iterator[None]:
        """Show the runs that are made in the context, of which there are to be so many."""
        with shown(title, total) as self._display:
            yield
        self._display = None

    def run_all(self, runs: Iterable[PlannedRun]) -> list[PlannedRun]:
        """Make the runs that are missing, in their order; return those that failed.

        Args:
            runs: of which the next one is asked for when it is to begin.
        """
        left, turn, failed = (run for run in runs if not is_done(self.output / run.folder)), threading.Lock(), []

        def work() -> None:
            while True:
                with turn:
                    run = next(left, None)
                if run is None:
                    return
                if not self._run(run):
                    failed.append(run)

        if self._workers == 1:
            work()
        else:
            threads = ThreadPoolExecutor(self._workers)
            try:
                for worker in [threads.submit(work) for _ in range(self._workers)]:
                    worker.result()
            finally:  # also on an interruption, after which no run is to begin
                threads.shutdown(wait=False, cancel_futures=True)
        return failed

    def _run(self, run: PlannedRun) -> bool:
        """Make a run; tell whether it ended well. If not, its folder says why."""
        folder, failure = prepare(run, self.output), None
        if self._display is not None:
            self._display.start(run, folder)
        try:
            self._launcher.run(run, folder)
        except RunError as error:
            failure = str(error)
            (folder / FAILURE).write_text(failure + "\n")
        if self._display is not None:
            self._display.end(run, folder, failure)
        return failure is None


def missing(runs: Sequence[PlannedRun], output: Path) -> list[PlannedRun]:
    """List the runs that have not ended well yet; of those that share a folder the first."""
    firsts = {run.folder: run for run in reversed(runs)}.values()
    return [run for run in reversed(firsts) if not is_done(output / run.folder)]


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


# --- all runs of an experiment ----------------------------------------------------------------------------------------
class MadeRuns(abc.ABC):
    """The runs of an experiment, in its folder. A notebook shows their table.

    Attributes:
        experiment: what was asked for.
        folder: of all files.
        plan: the runs that are known so far.
        skipped: sentences about what can't be run.
        failed: a run has failed; its folder says why, and the same call makes it again.
    """

    experiment: Comparison | Sweep
    plan: Sequence[PlannedRun]
    skipped: Sequence[str] = ()
    failed = False

    def __init__(self, experiment: Comparison | Sweep, folder: Path):
        """Read what is trained and the settings that all runs share; check them and the metric."""
        self.experiment, self.folder = experiment, folder
        self.trained = TrainedJob(experiment) if experiment.arguments is None else TrainedScript(experiment)
        self.higher_is_better = self.trained.higher_is_better

    @property
    @abc.abstractmethod
    def table(self) -> DataFrame:
        """Return what the runs have measured."""

    @abc.abstractmethod
    def write(self) -> None:
        """Write the plan down in the folder."""

    @abc.abstractmethod
    def run(self, runner: Runner) -> list[PlannedRun]:
        """Make all runs that are missing; return those that failed."""

    @abc.abstractmethod
    def show_table(self) -> None:
        """Show what the runs that have ended have measured."""

    def show(self, failed: Sequence[PlannedRun]) -> None:
        """Show the table, name the runs that failed, and write the report."""
        self.show_table()
        if sentence := self._unlogged():
            console.note(sentence)
        for run in failed:
            console.error(f"{self.folder / run.folder} failed: see {FAILURE} there. The same command makes it again.")
        if find_spec("matplotlib") is None:
            console.note(f"all runs are in {self.folder}; a report needs matplotlib: pip install 'hpcdist[plots]'")
            return
        console.note(f"all runs are in {self.folder}; the report is {self.report()}")

    def _unlogged(self) -> str | None:
        """Return a sentence where no run of a script has logged the metric by which runs are judged."""
        folders = [self.folder / run.folder for run in self.plan]
        found = [load_summary(folder).metrics for folder in folders if is_done(folder)]
        names, wanted = sorted({name for metrics in found for name in metrics}), self.experiment.metric
        if not found or (names and wanted in ("", *names)):
            return None
        logged = f"no {wanted}, but {', '.join(names)}" if names else "no metric"
        return f"{self.experiment.job} logs {logged} (hpcdist.log_metrics): runs can't be judged by their results"

    def report(self, output: str | Path | None = None) -> Path:
        """Write the report to a folder, None: `report` in that of the runs; return its page."""
        return report.write(self.folder, None if output is None else Path(output))

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False, na_rep="")


def run_all(runs: MadeRuns, launcher: Launcher, workers: int = 1) -> bool:
    """Make all runs that are missing, and show what they have measured; return whether one failed.

    Args:
        launcher, workers: see `Runner`.
    """
    output = runs.folder
    for sentence in runs.skipped:
        console.note(sentence)
    with (
        claimed(output),
        interruptible(lambda: f"`hpcdist {runs.experiment.command} --output {output}` goes on with it"),
    ):
        goes_on = (output / COMPARISON).exists()
        console.note(f"goes on in {output}" if goes_on else f"new folder: {output}")
        failed = runs.run(Runner(output, launcher, workers))
        runs.show(failed)
    return bool(failed)


@contextmanager
def interruptible(going_on: Callable[[], str]) -> Iterator[None]:
    """Take SIGTERM and SIGHUP for Ctrl-C, and say how to go on."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        console.note(going_on())
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- what is shown meanwhile ------------------------------------------------------------------------------------------
class RunsDisplay:
    """Show runs as they come and go: without a terminal a line for each that has ended. Threads may share it.

    Args:
        title: of the runs.
        total: number of runs to be made.
        bar: the progress of all, rich's, on a terminal.
    """

    def __init__(self, title: str, total: int, bar: Any = None):
        self._total, self._done, self._bar = total, 0, bar
        self._started_s = time.monotonic()
        self._running: dict[Path, tuple[PlannedRun, Run]] = {}
        self._lock = threading.Lock()
        if bar is not None:
            self._task = bar.add_task(title, total=total, left="")

    def start(self, run: PlannedRun, folder: Path) -> None:
        """Show a run as one under way."""
        with self._lock:
            self._running[folder] = run, Run(folder, follow=True)

    def end(self, run: PlannedRun, folder: Path, failure: str | None) -> None:
        """Show how a run has ended."""
        if failure is None:
            summary = load_summary(folder)
            said = _figures(summary.metrics) + (f" ({summary.stopped_early})" if summary.stopped_early else "")
        else:
            lines = [line for line in failure.splitlines() if line.strip()] or [""]
            named = (line for line in reversed(lines) if "error" in line.lower() or line.startswith("hpcdist: rank"))
            said = f"FAILED: {next(named, lines[-1])}"
        with self._lock:
            del self._running[folder]
            self._done += 1
            left, others = "", self._total - self._done
            if others > 0:  # they take as long as those so far: their order is random
                left = f"about {console.duration((time.monotonic() - self._started_s) / self._done * others)} left"
            line = f"{self._done} of {self._total}  {describe(run)}: {said}"
            if self._bar is None:
                console.note(f"{line}; {left}" if left else line)
                return
        self._bar.update(self._task, completed=self._done, left=left)
        self._bar.console.print(console.visible(line), markup=False)  # without the lock, as rich calls `lines` here

    def lines(self) -> list[str]:
        """Read the files of the runs under way, and describe each by its metrics and its loss."""
        with self._lock:
            running, found = list(self._running.items()), []
            for _, (run, read) in running[:MOST_LINES]:
                read.update()
                found.append(_state(run, read))
        return found + [f"and {len(running) - MOST_LINES} more"] * (len(running) > MOST_LINES)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(self._bar, Text("\n".join(self.lines()), no_wrap=True, overflow="ellipsis"))


def _state(run: PlannedRun, read: Run) -> str:
    """Describe a run under way: how much of it is done, its metrics, its loss."""
    metrics: dict[str, float | None] = {}
    limits = [setting.partition("=")[2] for setting in run.overrides if setting.startswith("budget.samples=")]
    part, whole = "", int(limits[-1]) if limits else None
    if read.evaluations:
        last = read.evaluations[-1]
        metrics, part = {**last.metrics}, f", {last.samples / whole:.0%}" if whole else ""
    metrics["loss"] = read.loss  # of training, instead of the test set's
    figures = _figures({name: value for name, value in metrics.items() if value is not None})
    return f"{describe(run)}{part}{figures and f': {figures}'}"


@contextmanager
def shown(title: str, total: int) -> Iterator[RunsDisplay]:
    """Show so many runs, in one live display where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield RunsDisplay(title, total)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    stderr = Console(stderr=True, highlight=False, markup=False)
    display = RunsDisplay(title, total, Progress(*columns, TextColumn("{task.fields[left]}"), console=stderr))
    with Live(display, console=stderr, refresh_per_second=REFRESHES_S):
        yield display


def describe(run: PlannedRun) -> str:
    """Describe a run in a few words: `softsync (splits 4), 4 ranks, seed 0`."""
    rate = next((setting.partition("=")[2] for setting in run.overrides if setting.startswith("optimizer.lr=")), None)
    rate = None if rate is None or "optimizer.lr=" in run.name else rate
    return f"{run.name}, {count(run.ranks, 'rank')}, {f'rate {float(rate):g}, ' if rate else ''}seed {run.seed}"


def _figures(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
