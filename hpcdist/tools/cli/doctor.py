"""`hpcdist doctor`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools.doctor.base import Requirements
from hpcdist.tools.doctor.report import ExaminationOptions

app = typer.Typer()


@app.command()
def doctor(
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks that there must be; default the launcher's number.")
    ] = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where the run will write.")] = Path("."),
    gpus: Annotated[bool, typer.Option("--gpus", help="Every rank must see a GPU.")] = False,
    spare: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Leave out the K worst nodes; only what is wrong with others counts."),
    ] = None,
    exclude_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the nodes to leave out there, for srun --exclude.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings, too, make the exit status 1.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write findings and measured values there.")
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1.0, metavar="S", help="Seconds that all may take.")] = 30.0,
) -> None:
    """Examine the nodes before a run: network, files, GPUs, clocks, versions, progress. Launch like train. Collective.

    Prints one line per finding. Exit status 0 if nothing is wrong, warnings aside; else 1.
    """
    from hpcdist.tools.doctor.examination import examine  # which imports MPI's part

    required = Requirements(ranks, folder, gpus, dict(os.environ))
    status = examine(required, ExaminationOptions(spare, exclude_file, strict, json_path, limit_s))
    if status:
        raise typer.Exit(status)
