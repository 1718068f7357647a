"""Show a submitted job on the terminal: its states, its log, and the progress of its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hpcdist.errors import QueueError
from hpcdist.records import open_regular
from hpcdist.tools.runs import Run, is_done
from hpcdist.tools.slurm import queue
from hpcdist.tools.slurm.history import Submission
from hpcdist.tools.slurm.state import State, describe
from hpcdist.tools.watch.view import RunView, view


def watch(entry: Submission) -> int:
    """Show a job until it has ended, and return its exit status. Ctrl-C ends the display, not the job."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), console=Console(stderr=True)) as bar:
        progress_task = bar.add_task(entry.name, total=None, figures="")
        run = Run(entry.output, follow=True)
        printed: dict[str, str] = {}  # the state of each job or task

        def show(states: Sequence[State]) -> None:
            for state in states:
                if printed.get(state.job) != state.state:
                    printed[state.job] = state.state
                    bar.console.print(describe(state), highlight=False, markup=False)
            if entry.cases:
                done = sum(state.state == "COMPLETED" for state in states)
                bar.update(progress_task, completed=done, total=entry.cases, figures=f"{done} of {entry.cases} runs")
            else:
                run.update()
                run_view = view(entry.name, run, curves=False)
                total = None if run_view.fraction is None else 1.0
                bar.update(progress_task, completed=run_view.fraction or 0.0, total=total, figures=_figures(run_view))

        return queue.wait(entry.job, show)


def _figures(now: RunView) -> str:
    return f"step {now.step}, {now.samples} samples" + ("" if now.loss is None else f", loss {now.loss:.4f}")


def facts(job: str, entry: Submission | None, states: Sequence[State]) -> dict[str, str]:
    """Return a job's properties: the states of its tasks, and with its entry in the history its run, log, script..."""
    descriptions = {state.job: describe(state).partition(" is ")[2] for state in states}
    if entry is None:
        return descriptions
    ended = sum(map(is_done, entry.folders))
    if entry.cases:
        run = f"{ended} of {entry.cases} runs have ended"
    else:
        run = _figures(view(entry.name, Run(entry.output, follow=True), curves=False)) + ", has ended" * ended
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
    """Print a job's log, or the logs of an array's tasks; with `follow`, until the job has ended."""
    n_printed: dict[Path, int] = {}  # bytes of each log
    last_log: list[Path] = []  # log of the last output

    def show(*_: object) -> None:
        paths = queue.logs(job)
        for path in paths:
            with open_regular(path) as file:
                file.seek(n_printed.get(path, 0))
                data = file.read()
            n_printed[path] = n_printed.get(path, 0) + len(data)
            if len(paths) > 1 and data and last_log != [path]:
                last_log[:] = [path]
                print(f"==> {path} <==")
            print(data.decode(errors="replace"), end="", flush=True)

    if follow:
        queue.wait(job, show)
    show()
    if not n_printed:
        raise QueueError(
            f"job {job} must have started to have a log; got none yet: {describe(queue.states(job)[0])}. Add --follow "
            "to wait for it."
        )
