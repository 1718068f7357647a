"""`hpcdist report`: compare runs in a table, and on a page with verdict, figures and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.config import differing
from hpcdist.errors import ConfigError
from hpcdist.tools import console
from hpcdist.tools.cli.options import Target, read_target


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders with runs in them.")],
    html: Annotated[
        bool, typer.Option("--html", help="Also write a web page with figures and tables, in FOLDER/report.")
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the web page into this folder.")] = None,
    target: Target = None,
) -> None:
    """Compare runs in one table: their metrics, their cost, and the settings in which they differ."""
    from hpcdist.records import load_run, load_summary

    wanted = None if target is None else read_target(target)
    tuning = {path.parent / "tuning" for folder in folders for path in folder.glob("**/comparison.json")}
    found = (path.parent for folder in folders for path in sorted(folder.glob("**/summary.json")))
    runs = list(dict.fromkeys(folder for folder in found if not tuning & set(folder.parents)))
    if not runs:
        raise ConfigError(
            f"folders must hold a run's summary.json; got none in {', '.join(map(str, folders))}. A run writes it at "
            "its end."
        )
    settings = {folder: run.last.settings for folder in runs if (run := load_run(folder)) is not None}
    console.runs({folder: load_summary(folder) for folder in runs}, differing(settings))
    if html or output is not None or wanted is not None:
        from hpcdist.tools.report import write

        console.note(f"written: {write(folders, output, target=wanted)}")
