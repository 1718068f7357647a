"""`hpcdist doctor`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools.cli.base import Json, on_all_ranks, whole_number, writable
from hpcdist.tools.options import flag, option

app = typer.Typer()


@app.command()
@on_all_ranks
def doctor(
    ranks: Annotated[int | None, whole_number("Expected number of ranks. Default: the launcher's.")] = None,
    folder: Annotated[Path, option("FOLDER", "Folder that the run will write to.", file_okay=False)] = Path("."),
    gpus: Annotated[bool, flag("--gpus", "Every rank must see a GPU.")] = False,
    spare: Annotated[
        int | None, option("K", "Exclude the K worst nodes: only errors of the others count.", min=0)
    ] = None,
    exclude_file: Annotated[
        Path | None, option("FILE", "Write the nodes to exclude to this file, for srun --exclude.", callback=writable)
    ] = None,
    strict: Annotated[bool, flag("--strict", "Exit with status 1 after warnings, too.")] = False,
    json_path: Json = None,
    limit_s: Annotated[float, option("SECONDS", "Time limit of the whole examination.", min=1.0)] = 30.0,
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
