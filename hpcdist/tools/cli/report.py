"""`hpcdist report|watch`: runs that have ended, compared; runs that train, as they go on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import ConfigError
from hpcdist.tools import console
from hpcdist.tools.cli.base import Target, read_target

app = typer.Typer()


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders with runs in them.")],
    html: Annotated[
        bool, typer.Option("--html", help="Also write a web page with figures and tables, in FOLDER/report.")
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the web page into this folder.")] = None,
    target: Target = None,
) -> None:
    """Compare runs in one table: their metrics, their cost, and the settings in which they differ."""
    from hpcdist.config import differing
    from hpcdist.tools.runs import Run, find_runs, is_done

    wanted = None if target is None else read_target(target)
    runs = [Run(folder) for folder in find_runs(folders) if is_done(folder)]
    if not runs:
        raise ConfigError(
            f"folders must hold a run's summary.json; got none in {', '.join(map(str, folders))}. A run writes it at "
            "its end."
        )
    settings = {run.folder: run.settings for run in runs if run.start is not None}
    console.runs({run.folder: run.summary for run in runs if run.summary is not None}, differing(settings))
    if html or output is not None or wanted is not None:
        from hpcdist.tools.report import write

        console.note(f"written: {write(folders, output, target=wanted)}")


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, of a comparison, or of several runs.")],
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state once, then end.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show a web page instead, and print its address. Ctrl-C ends it.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the web page. 0: any free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address of the web page. Only this machine can open 127.0.0.1.")] = (
        "127.0.0.1"
    ),
) -> None:
    """Show runs while they train: curves, speed, who waits for whom, time left.

    It ends when the runs have ended. If a run has died, the exit status is 1.
    """
    if not serve:
        from hpcdist.tools.watch import terminal

        if not terminal.watch(folder, every, once):
            raise typer.Exit(1)
        return
    from hpcdist.tools.watch.page import PageServer

    with PageServer(folder, host, port, every) as server:
        console.note(f"serving {folder} at {server.address} until Ctrl-C")
        if hint := server.tunnel:
            console.note(f"from another machine: {hint}, and open the address there")
        server.serve_forever()
