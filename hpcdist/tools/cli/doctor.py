"""`hpcdist doctor`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools.cli.base import Json, on_all_ranks, whole_number, writable

app = typer.Typer()


@app.command()
@on_all_ranks
def doctor(
    ranks: Annotated[int | None, whole_number("Expected number of ranks. Default: the launcher's.")] = None,
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", file_okay=False, help="Folder that the run will write to.")
    ] = Path("."),
    gpus: Annotated[bool, typer.Option("--gpus", help="Every rank must see a GPU.")] = False,
    spare: Annotated[
        int | None, typer.Option(min=0, metavar="K", help="Exclude the K worst nodes: only errors of the others count.")
    ] = None,
    exclude_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the nodes to exclude to this file, for srun --exclude.", callback=writable
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 after warnings, too.")] = False,
    json_path: Json = None,
    limit_s: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit of the whole examination.")
    ] = 30.0,
) -> None:
    """Check the nodes before a run: network, files, GPUs, clocks, versions, progress of messages.

    Collective: start it like the training. Each finding is a line. The exit status is 1 if there is an error.

    Example: mpirun -n 4 hpcdist doctor --folder runs
    """
    from hpcdist.tools.doctor.base import Requirements
    from hpcdist.tools.doctor.examination import examine  # which imports MPI's part

    if status := examine(
        Requirements(ranks, folder, gpus, dict(os.environ), spare, exclude_file, strict, json_path, limit_s)
    ):
        raise typer.Exit(status)
