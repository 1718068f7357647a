"""Show a comparison while it goes on: one live display on a terminal, or else a line for each run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.records import load_summary
from hpcdist.tools import console
from hpcdist.tools.compare.plan import PlannedRun, counted_ranks
from hpcdist.tools.runs import Run

LOOK_S = 1.0  # between two looks at a run's files
MOST_LINES = 8  # of runs that are under way at the same time; the others are counted


class RunsDisplay:
    """Show runs as they come and go: without a terminal a line for each that has ended. Threads may share it.

    Args:
        title: of the runs.
        total: number of runs to be made.
        bar, current: the progress of all and a line for each run under way, rich's, on a terminal.
    """

    def __init__(self, title: str, total: int, bar: Any = None, current: Any = None):
        self._total, self._done, self._bar, self._lines = total, 0, bar, current
        self._started_s = time.monotonic()
        self._running: dict[Path, tuple[PlannedRun, Run]] = {}
        self._lock = threading.Lock()
        if bar is not None:
            self._task = bar.add_task(title, total=total, left="")

    # --- runs come and go ---------------------------------------------------------------------------------------------
    def begin(self, run: PlannedRun, folder: Path) -> None:
        """Show a run as one under way."""
        with self._lock:
            self._running[folder] = run, Run(folder, follow=True)
        self.look()

    def end(self, run: PlannedRun, folder: Path, failure: str | None) -> None:
        """Show how a run has ended."""
        said = f"FAILED: {_last_line(failure)}" if failure is not None else _figures(load_summary(folder).metrics)
        with self._lock:
            del self._running[folder]
            self._done += 1
            left = self.left()
            line = f"{self._done} of {self._total}  {describe(run)}: {said}"
            if self._bar is None:
                console.note(f"{line}{f'; about {left} left' if left else ''}")
            else:
                self._bar.console.print(line)
                self._bar.update(self._task, completed=self._done, left=left and f"about {left} left")
        self.look()

    def left(self) -> str:
        """Estimate the time that the other runs take: as long as those so far, whose order is random."""
        missing = self._total - self._done
        if not self._done or missing <= 0:
            return ""
        return console.duration((time.monotonic() - self._started_s) / self._done * missing)

    def look(self) -> None:
        """Look at the files of the runs under way, and show the metrics and the loss of each."""
        if self._bar is None:
            return
        with self._lock:
            running, lines = list(self._running.items()), []
            for folder, (run, read) in running[:MOST_LINES]:
                if read.ended:  # at an earlier rung of a sweep, whose summary is there until the run ends again
                    self._running[folder] = run, (read := Run(folder, follow=True))
                else:
                    read.update()
                lines.append(_state(run, read))
        lines += [f"and {len(running) - MOST_LINES} more"] * (len(running) > MOST_LINES)
        self._lines.plain = "\n".join(lines)


def _state(run: PlannedRun, read: Run) -> str:
    """Describe a run under way: how much of it is done, its metrics, its loss."""
    metrics: dict[str, float | None] = {}
    part, whole = "", _samples(run)
    if read.evaluations:
        last = read.evaluations[-1]
        metrics, part = {**last.metrics}, f", {last.samples / whole:.0%}" if whole else ""
    metrics["loss"] = read.loss  # of training, instead of the test set's
    shown = _figures({name: value for name, value in metrics.items() if value is not None})
    return f"{describe(run)}{part}{shown and f': {shown}'}"


@contextmanager
def shown(title: str, total: int) -> Iterator[RunsDisplay]:
    """Show so many runs, in one live display where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield RunsDisplay(title, total)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    stderr = Console(stderr=True, highlight=False, markup=False)
    bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=stderr)
    current = Text(no_wrap=True, overflow="ellipsis")
    display, ended = RunsDisplay(title, total, bar, current), threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            display.look()

    watcher = threading.Thread(target=watch, daemon=True)
    with Live(Group(bar, current), console=stderr, refresh_per_second=2):
        watcher.start()
        try:
            yield display
        finally:
            ended.set()
            watcher.join()


def describe(run: PlannedRun) -> str:
    """Describe a run in a few words: `softsync (splits 4), 4 ranks, seed 0`."""
    rate = next((setting.partition("=")[2] for setting in run.overrides if setting.startswith("optimizer.lr=")), None)
    rate = None if rate is None or "optimizer.lr=" in run.name else rate
    return f"{run.name}, {counted_ranks(run.ranks)}, {f'rate {float(rate):g}, ' if rate else ''}seed {run.seed}"


def _figures(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _samples(run: PlannedRun) -> int | None:
    """Return the samples of the whole run, where its budget tells them."""
    found = [setting.partition("=")[2] for setting in run.overrides if setting.startswith("budget.samples=")]
    return int(found[-1]) if found else None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
