"""`hpcdist train`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import LEFT, ConfigError
from hpcdist.tools import console
from hpcdist.tools.cli.base import JobFile, on_all_ranks
from hpcdist.tools.options import Config, Overrides, flag, option

app = typer.Typer()


@app.command()
@on_all_ranks
def train(
    job: JobFile,
    config: Config = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, option("FOLDER", "This run's folder; by default a new one in runs/.")] = None,
    resume: Annotated[
        bool, flag("--resume", "Resume from the newest checkpoint in --output, if there is one.")
    ] = False,
    allow_changes: Annotated[bool, flag("--allow-changes", "With --resume, allow changed settings.")] = False,
    progress: Annotated[
        console.ProgressMode,
        typer.Option(help="live: one rewritten line; auto: live on a terminal, lines in a file or a pipe."),
    ] = console.ProgressMode.auto,
    timeline: Annotated[
        bool, flag("--timeline", "Write timeline.json: each rank's activities and waits over time.")
    ] = False,
    bind: Annotated[
        bool, typer.Option(help="Bind each rank to separate cores unless the launcher has bound it.")
    ] = True,
    baseline: Annotated[str | None, typer.Option(hidden=True, help="Train with another library.")] = None,
    ranks: Annotated[str | None, typer.Option("--ranks", "-n", hidden=True, help="Refused: the launcher's.")] = None,
) -> None:
    """Train a job on the ranks that mpirun or srun started. Collective.

    On Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2, and before a Slurm job's time limit, all ranks save a checkpoint after the
    same step and exit with status 75; the command to resume is printed. A second Ctrl-C ends them immediately.
    """
    from hpcdist import session
    from hpcdist.comm.launch import job_end
    from hpcdist.registry import catalogue
    from hpcdist.tools.baselines.base import BaselineTrainer
    from hpcdist.train import runs

    if ranks is not None:
        raise ConfigError(
            f"--ranks must be given to the launcher that starts them; got {ranks} behind train. Write it as "
            f"hpcdist run -n {ranks} hpcdist train {job}, or mpirun -n {ranks} hpcdist train {job}."
        )
    comm = session.init(bind=bind, run=False)
    show = console.progress(progress, in_notebook="JPY_PARENT_PID" in os.environ)  # set in Jupyter's kernels
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
        make=runs.Trainer if baseline is None else partial(BaselineTrainer, catalogue("baselines").load(baseline)),
    )
    if summary is None:
        raise typer.Exit(LEFT)
    if comm.rank == comm.failures.alive[0]:
        console.result(folder, summary)
        if summary.stopped_early is not None:
            console.note(summary.stopped_early)
        if (best := summary.best) is not None and best.checkpoint is not None:
            better = f"; {best.value:.4g} at step {best.step} was better, and is not saved"
            saved = best.checkpoint.endswith(f"{best.step:08d}")  # the checkpoint is of the best step
            console.note(f"the best checkpoint by {best.metric} is {best.checkpoint}{'' if saved else better}")
