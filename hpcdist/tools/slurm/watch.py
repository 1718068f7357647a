"""Show a submitted job on the terminal: its states, its log, and its progress by the records of its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hpcdist.errors import QueueError
from hpcdist.tools.runs import Run, is_done
from hpcdist.tools.slurm import queue
from hpcdist.tools.slurm.history import Submission
from hpcdist.tools.slurm.spec import JobSpec
from hpcdist.tools.slurm.state import State, describe


def watch(entry: Submission, spec: JobSpec) -> int:
    """Show a job until it has ended, and return its exit status. An interruption ends only the display."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), console=Console(stderr=True)) as bar:
        return queue.wait(entry.job, _Shown(entry, spec, bar))


class _Shown:
    """The display of a job: each call prints changes of its state and moves the progress bar."""

    def __init__(self, entry: Submission, spec: JobSpec, bar: Progress):
        self._entry, self._spec, self._bar = entry, spec, bar
        self._line = bar.add_task(entry.name, total=entry.cases or None, figures="")
        self._run = Run(entry.output, follow=True)
        self._printed: dict[str, str] = {}  # the state of each job or task
        self._total: int | None = None
        self._knows_total = False

    def __call__(self, states: Sequence[State]) -> None:
        for one in states:
            if self._printed.get(one.job) != one.state:
                self._printed[one.job] = one.state
                self._bar.console.print(describe(one), highlight=False, markup=False)
        if self._entry.cases:
            done = sum(one.state == "COMPLETED" for one in states)
            self._bar.update(self._line, completed=done, figures=f"{done} of {self._entry.cases} runs")
        else:
            self._show_run()

    def _show_run(self) -> None:
        now = progress(self._run)
        if now.samples and not self._knows_total:  # the run has its data by now
            self._knows_total = True
            try:
                self._total = total_samples(self._spec)
            except Exception:  # the job's file may need what is not on this host; the run itself is under way
                self._total = None
        loss = "" if now.loss is None else f"  loss {now.loss:.4f}"
        figures = f"step {now.step}{loss}" if now.step else ""
        self._bar.update(self._line, completed=now.samples, total=self._total, figures=figures)


def facts(job: str, entry: Submission | None, states: Sequence[State]) -> dict[str, str]:
    """Collect the facts about a job: the states of its tasks, its run, its log, its script and commit."""
    descriptions = {one.job: describe(one).partition(" is ")[2] for one in states}
    if entry is None:
        return descriptions
    ended = sum(map(is_done, entry.folders))
    if entry.cases:
        run = f"{ended} of {entry.cases} runs have ended"
    else:
        now = progress(Run(entry.output, follow=True))
        run = f"step {now.step}, {now.samples} samples"
        run += ("" if now.loss is None else f", loss {now.loss:.4f}") + ", has ended" * ended
    commit = "none" if entry.commit is None else f"{entry.commit[:12]}{' and changes' if entry.dirty else ''}"
    return {
        **descriptions,
        "name": entry.name,
        "run": f"{entry.output}: {run}",
        "log": entry.log,
        "script": entry.script,
        "commit": commit,
    }


def show_logs(job: str, follow: bool) -> None:
    """Print a job's log, or those of an array's tasks with their names; with `follow`, until the job has ended."""
    printed: dict[Path, int] = {}
    last: list[Path] = []

    def show(*_: object) -> None:
        paths = queue.logs(job)
        for path in paths:
            with open(path, "rb") as file:
                file.seek(printed.get(path, 0))
                data = file.read()
            printed[path] = printed.get(path, 0) + len(data)
            if len(paths) > 1 and data and last != [path]:
                last[:] = [path]
                print(f"==> {path} <==")
            print(data.decode(errors="replace"), end="", flush=True)

    if follow:
        queue.wait(job, show)
    show()
    if not printed:
        raise QueueError(
            f"job {job} must have begun to have a log; got none yet: {describe(queue.states(job)[0])}. Add --follow to "
            "wait for it."
        )


# --- progress ---------------------------------------------------------------------------------------------------------
class JobProgress(NamedTuple):
    """The progress that a run's ranks have recorded so far."""

    step: int  # of the rank that has made the most
    samples: int  # of all ranks together
    loss: float | None  # the mean of the ranks' newest losses


def progress(run: Run) -> JobProgress:
    """Read what a run's ranks have recorded; the run is followed, so that the next call reads what is new."""
    run.update()
    step = int(run.steps.recent["step"].max()) if len(run.steps.recent) else 0
    return JobProgress(step, int(run.steps.frame["samples"].sum()), run.loss)


def total_samples(spec: JobSpec) -> int | None:
    """Return the number of samples that a job's run trains on in all; None while that is unknown.

    Loads the job's file, and with it torch.
    """
    if spec.job is None:
        return None
    from hpcdist.data.hdf5 import HDF5Dataset
    from hpcdist.train.milestones import planned_samples
    from hpcdist.train.runs import specify

    _, config = specify(Path(spec.job), None if spec.config is None else Path(spec.config), spec.run_settings)
    path = Path(config.data.path)
    if not path.exists():  # the run's first rank makes it
        return None
    data = HDF5Dataset(path, "train")
    try:
        return planned_samples(config, len(data))
    finally:
        data.close()
