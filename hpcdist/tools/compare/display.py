"""Show a comparison while it goes on: one live display on a terminal, or else a line for each run."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.errors import DataError
from hpcdist.records import load_summary, read_evaluations
from hpcdist.tools import console
from hpcdist.tools.compare.plan import PlannedRun

LOOK_S = 1.0  # between two looks at a run's files
MOST_LINES = 8  # of runs that are under way at the same time; the others are counted
TAIL_BYTES = 4096  # of a file of records, in which its last loss is found


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
        self._running: dict[Path, PlannedRun] = {}
        self._lock = threading.Lock()
        if bar is not None:
            self._task = bar.add_task(title, total=total, left="")

    # --- runs come and go ---------------------------------------------------------------------------------------------
    def begin(self, run: PlannedRun, folder: Path) -> None:
        """Show a run as one under way."""
        with self._lock:
            self._running[folder] = run
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
            running = list(self._running.items())
        lines = [_state(run, folder) for folder, run in running[:MOST_LINES]]
        lines += [f"and {len(running) - MOST_LINES} more"] * (len(running) > MOST_LINES)
        self._lines.plain = "\n".join(lines)


def _state(run: PlannedRun, folder: Path) -> str:
    """Describe a run under way: how much of it is done, its metrics, its loss."""
    try:
        evaluations = read_evaluations(folder)
    except (DataError, OSError):  # it is being written
        return describe(run)
    metrics = dict(evaluations[-1].metrics) if evaluations else {}
    metrics["loss"] = last_loss(folder)  # of training, instead of the test set's
    shown = _figures({name: value for name, value in metrics.items() if value is not None})
    whole = _samples(run)
    part = f", {evaluations[-1].samples / whole:.0%}" if whole and evaluations else ""
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
    ranks = f"{run.ranks} rank{'s' * (run.ranks > 1)}"
    return f"{run.name}, {ranks}, {f'rate {float(rate):g}, ' if rate else ''}seed {run.seed}"


def last_loss(folder: Path) -> float | None:
    """Find the last loss in the records of a run, which are being written; None where there is none yet."""
    files = sorted(folder.glob("records-rank*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[1:-1]  # the first and the last one may be cut
        for line in reversed(lines):
            try:
                loss = json.loads(line).get("loss")
            except ValueError:
                continue
            if loss is not None:
                return loss
    return None


def _figures(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _samples(run: PlannedRun) -> int | None:
    """Return the samples of the whole run, where its budget tells them."""
    found = [setting.partition("=")[2] for setting in run.overrides if setting.startswith("budget.samples=")]
    return int(found[-1]) if found else None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
