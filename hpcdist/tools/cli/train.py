"""`hpcdist train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import LEFT
from hpcdist.tools import console
from hpcdist.tools.cli.base import JobFile, on_all_ranks
from hpcdist.tools.options import Config, Overrides

app = typer.Typer()


@app.command()
@on_all_ranks
def train(
    job: JobFile,
    config: Config = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="This run's folder; by default a new one in runs/.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output; without one start anew.")
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="With --resume, go on also with settings that have changed.")
    ] = False,
    progress: Annotated[
        console.ProgressMode,
        typer.Option(help="One line that is rewritten, or lines; auto: live on a terminal, lines in a file or a pipe."),
    ] = console.ProgressMode.auto,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Write timeline.json: who did what when, and waited for whom.")
    ] = False,
    bind: Annotated[bool, typer.Option(help="Give each rank cores of its own where nothing has bound it.")] = True,
) -> None:
    """Train a job on the ranks that mpirun or srun started. Collective.

    On Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2, and before a Slurm job's time limit, all ranks save a checkpoint and leave
    after the same step, with status 75, and the command that goes on is shown. Ctrl-C again ends them at once.
    """
    from hpcdist import session
    from hpcdist.comm.launch import job_end
    from hpcdist.train import runs

    comm = session.init(bind=bind, run=False)
    show = console.progress(progress, in_notebook="JPY_PARENT_PID" in os.environ)  # which Jupyter's kernels get
    ends_at = job_end(os.environ) if comm.rank == 0 else None
    folder, summary = runs.train(
        comm,
        job,
        config,
        overrides or [],
        output,
        resume,
        show,
        ends_at,
        command=sys.argv,
        timeline=timeline,
        allow_changes=allow_changes,
        environment=os.environ,
    )
    if summary is None:
        raise typer.Exit(LEFT)
    if comm.rank == comm.failures.alive[0]:
        console.result(folder, summary)
        if summary.stopped_early is not None:
            console.note(summary.stopped_early)
        if (best := summary.best) is not None and best.checkpoint is not None:
            better = f"; {best.value:.4g} at step {best.step} was better, and is not saved"
            saved = best.checkpoint.endswith(f"{best.step:08d}")
            console.note(f"the best checkpoint by {best.metric} is {best.checkpoint}{'' if saved else better}")
