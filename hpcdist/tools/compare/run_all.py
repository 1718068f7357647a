"""Run what is missing of an experiment and show its progress; a failed run is recorded, and the others continue."""

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

from pandas import DataFrame
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hpcdist.errors import RunError
from hpcdist.records import load_summary, locked
from hpcdist.tools import console, report
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.launchers import Launcher
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.compare.trained import TrainedJob, TrainedScript
from hpcdist.tools.runs import COMPARISON, FAILURE, Run, is_done

REFRESHES_S = 1.0  # between two reads of the running runs' files
MAX_LINES = 8  # shown of concurrent runs; the others are counted


class Runner:
    """Execute planned runs in the experiment's folder, each once.

    Args:
        output: the experiment's folder.
        launcher: starts each run.
        workers: concurrent runs, one thread each.
    """

    def __init__(self, output: Path, launcher: Launcher, workers: int = 1):
        self.output, self._launcher, self._workers = output, launcher, workers
        self._display: RunsDisplay | None = None

    @contextmanager
    def display(self, title: str, total: int) -> Iterator[None]:
        """Show the progress of `total` runs while the context is open."""
        with RunsDisplay(title, total) as self._display:
            yield
        self._display = None

    def run_all(self, runs: Iterable[PlannedRun]) -> list[PlannedRun]:
        """Execute the runs that are missing, in order; return the failed ones.

        Args:
            runs: an iterator; its next run is taken only when that run can start.
        """
        remaining, lock, failed = (run for run in runs if not is_done(self.output / run.folder)), threading.Lock(), []

        def work() -> None:
            while True:
                with lock:  # threads can't share a generator
                    run = next(remaining, None)
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
                    worker.result()  # raises what its thread raised
            finally:  # also after an interruption: start no further run
                threads.shutdown(wait=False, cancel_futures=True)
        return failed

    def _run(self, run: PlannedRun) -> bool:
        """Execute a run; return whether it succeeded. On failure the run's folder holds the reason."""
        folder, failure = prepare(run, self.output), None
        if self._display is not None:
            self._display.begin(run, folder)
        try:
            self._launcher.run(run, folder)
        except RunError as error:
            failure = str(error)
            (folder / FAILURE).write_text(failure + "\n")
        if self._display is not None:
            self._display.end(run, folder, failure)
        return failure is None


def missing(runs: Sequence[PlannedRun], output: Path) -> list[PlannedRun]:
    """List the runs without a result; the first one of runs that share a folder."""
    firsts = {run.folder: run for run in reversed(runs)}.values()  # the last assignment to a folder remains
    return [run for run in reversed(firsts) if not is_done(output / run.folder)]


def prepare(run: PlannedRun, output: Path) -> Path:
    """Create and return the folder of a run before it starts. A partial run that can't be resumed is deleted."""
    folder = output / run.folder
    if not (folder / "checkpoints").exists():
        shutil.rmtree(folder, ignore_errors=True)
    (folder / FAILURE).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# --- runs of an experiment --------------------------------------------------------------------------------------------
class ExperimentRuns(abc.ABC):
    """The runs of an experiment, in its folder. A notebook shows their table.

    Attributes:
        experiment: the settings.
        folder: of all files.
        plan: the planned runs.
        skipped: one sentence per group that can't run.
        failed: a run has failed. Its folder holds the reason; the same call runs it again.
    """

    experiment: Comparison | Sweep
    plan: Sequence[PlannedRun]
    skipped: Sequence[str] = ()
    failed = False

    def __init__(self, experiment: Comparison | Sweep, folder: Path):
        """Load the job or script, and check its settings and metric."""
        self.experiment, self.folder = experiment, folder
        self.trained = TrainedJob(experiment) if experiment.arguments is None else TrainedScript(experiment)
        self.higher_is_better = self.trained.higher_is_better

    @property
    @abc.abstractmethod
    def table(self) -> DataFrame:
        """Return the results."""

    @abc.abstractmethod
    def write(self) -> None:
        """Write the plan to the folder."""

    @abc.abstractmethod
    def run(self, runner: Runner) -> list[PlannedRun]:
        """Execute all runs that are missing; return the failed ones."""

    @abc.abstractmethod
    def show_table(self) -> None:
        """Print the results of the finished runs."""

    def show(self, failed: Sequence[PlannedRun]) -> None:
        """Print the table and the failed runs, and write the report."""
        self.show_table()
        if sentence := self._unlogged():
            console.note(sentence)
        for run in failed:
            console.error(f"{self.folder / run.folder} failed: see {FAILURE} there. The same command runs it again.")
        if find_spec("matplotlib") is None:
            console.note(f"all runs are in {self.folder}; a report needs matplotlib: pip install 'hpcdist[plots]'")
            return
        console.note(f"all runs are in {self.folder}; the report is {self.report()}")

    def _unlogged(self) -> str | None:
        """Return a warning if no run of a script has logged the experiment's metric."""
        folders = [self.folder / run.folder for run in self.plan]
        results = [load_summary(folder).metrics for folder in folders if is_done(folder)]
        logged, metric = sorted({name for metrics in results for name in metrics}), self.experiment.metric
        if not results or (logged and metric in ("", *logged)):  # "": any metric
            return None
        text = f"no {metric}, but {', '.join(logged)}" if logged else "no metric"
        return f"{self.experiment.job} logs {text} (hpcdist.log_metrics): runs can't be judged by their results"

    def report(self, output: str | Path | None = None) -> Path:
        """Write the report to a folder (default: `report` in the runs' folder); return the path of its page."""
        return report.write(self.folder, None if output is None else Path(output))

    def __repr__(self) -> str:
        return f"{type(self).__name__} in {self.folder}\n{self.table.to_string(index=False, na_rep='')}"

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False, na_rep="")


def run_all(runs: ExperimentRuns, launcher: Launcher, workers: int = 1) -> bool:
    """Execute all runs that are missing by a `Runner`, and show the results; return whether one failed."""
    output = runs.folder
    for sentence in runs.skipped:
        console.note(sentence)
    with locked(output), interruptible(lambda: f"`hpcdist {runs.experiment.command} --output {output}` resumes it"):
        resumed = (output / COMPARISON).exists()
        console.note(f"resuming in {output}" if resumed else f"new folder: {output}")
        failed = runs.run(Runner(output, launcher, workers))
        runs.show(failed)
    return bool(failed)


@contextmanager
def interruptible(resume_hint: Callable[[], str]) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, and print how to resume."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous_handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        console.note(resume_hint())
        raise
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


# --- progress display ------------------------------------------------------------------------------------------------
class RunsDisplay(Progress):
    """Progress of concurrent runs: a live display on a terminal, else a line per finished run. Thread-safe."""

    def __init__(self, title: str, total: int):
        columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
        stderr, shows = Console(stderr=True, highlight=False, markup=False), sys.stderr.isatty()
        left = TextColumn("{task.fields[left]}")
        self._total, self._done, self._started_s = total, 0, time.monotonic()
        self._running: dict[Path, tuple[PlannedRun, Run]] = {}
        self._changing = threading.Lock()
        super().__init__(*columns, left, console=stderr, disable=not shows, refresh_per_second=REFRESHES_S)
        self._all = self.add_task(title, total=total, left="")

    def begin(self, run: PlannedRun, folder: Path) -> None:
        with self._changing:
            self._running[folder] = run, Run(folder, follow=True)

    def end(self, run: PlannedRun, folder: Path, failure: str | None) -> None:
        """Remove a run from the display, and print its result."""
        if failure is None:
            summary = load_summary(folder)
            text = _format_metrics(summary.metrics) + (f" ({summary.stopped_early})" if summary.stopped_early else "")
        else:
            lines = [line for line in failure.splitlines() if line.strip()] or [""]
            reasons = (line for line in reversed(lines) if "error" in line.lower() or line.startswith("hpcdist: rank"))
            text = f"FAILED: {next(reasons, lines[-1])}"
        with self._changing:
            del self._running[folder]
            self._done += 1
            left, n_left = "", self._total - self._done
            if n_left > 0:  # estimated from the finished runs: their order is random
                left = f"about {console.duration((time.monotonic() - self._started_s) / self._done * n_left)} left"
            line = f"{self._done} of {self._total}  {describe(run)}: {text}"
            if self.disable:
                console.note(f"{line}; {left}" if left else line)
                return
        self.update(self._all, completed=self._done, left=left)
        self.console.print(console.visible(line), markup=False)  # not under the lock: rich calls `lines` here

    def lines(self) -> list[str]:
        """Read the files of the running runs; return a line for each: share that is done, metrics, training loss."""
        with self._changing:
            running, lines = list(self._running.values()), []
            for run, run_files in running[:MAX_LINES]:
                run_files.update()
                lines.append(_state(run, run_files))
        return lines + [f"and {len(running) - MAX_LINES} more"] * (len(running) > MAX_LINES)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text("\n".join(self.lines()), no_wrap=True, overflow="ellipsis")


def _state(run: PlannedRun, read: Run) -> str:
    """Describe a running run in one line, from its files (`read`)."""
    metrics: dict[str, float | None] = {}
    limits = [setting.partition("=")[2] for setting in run.overrides if setting.startswith("budget.samples=")]
    progress, limit = "", int(limits[-1]) if limits else None
    if read.evaluations:
        last = read.evaluations[-1]
        metrics, progress = {**last.metrics}, f", {last.samples / limit:.0%}" if limit else ""
    metrics["loss"] = read.loss  # training loss, in place of the test loss
    figures = _format_metrics({name: value for name, value in metrics.items() if value is not None})
    return f"{describe(run)}{progress}{figures and f': {figures}'}"


def describe(run: PlannedRun) -> str:
    """Describe a run briefly: `softsync (splits 4), 4 ranks, seed 0`."""
    rate = next((setting.partition("=")[2] for setting in run.overrides if setting.startswith("optimizer.lr=")), None)
    rate = None if rate is None or "optimizer.lr=" in run.name else rate  # a trial's name holds its settings
    return f"{run.name}, {console.count(run.ranks, 'rank')}, {f'rate {float(rate):g}, ' if rate else ''}seed {run.seed}"


def _format_metrics(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
