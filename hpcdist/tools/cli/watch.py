"""`hpcdist watch`: runs while they train, in the terminal or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools import console


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
