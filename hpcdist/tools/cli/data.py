"""`hpcdist data`: data sets in HDF5."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import ConfigError
from hpcdist.tools import console
from hpcdist.tools.cli.base import Overrides

app = typer.Typer(name="data", no_args_is_help=True, help="Data sets in HDF5.")


@app.command("import")
def data_import(
    name: Annotated[str, typer.Argument(help="Importer, such as digits or images; an unknown name lists all.")],
    source: Annotated[str, typer.Argument(help="File or folder to read; `sklearn` for digits.")],
    destination: Annotated[Path, typer.Argument(help="HDF5 file to write.")],
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if there is one.")] = False,
) -> None:
    """Write a data set as HDF5. Options of the importer are given with --set."""
    from hpcdist.config import checked_options, load
    from hpcdist.data import describe, importers

    convert = importers.load(name)
    if destination.exists() and not overwrite:
        raise ConfigError(f"destination must be a new file; got {destination}, which exists. Add --overwrite to it.")
    options = checked_options(convert, load({}, None, overrides or []))
    console.facts(describe(convert(source, destination, **options)))


@app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="mnist or fashion-mnist.")],
    folder: Annotated[Path | None, typer.Argument(help="Where the files go; by default data/NAME.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A folder that has the files, compressed by gzip or not.")
    ] = None,
) -> None:
    """Get the original files of a data set, and say from where; an interrupted download goes on."""
    from hpcdist.data.fetch import RELEASES, fetch

    folder = Path("data", name) if folder is None else folder
    with console.downloads() as show:
        origin = fetch(name, folder, source=source, show=show)
    step = f"hpcdist data import {RELEASES[name].importer} {folder} {name}.h5"
    console.facts({RELEASES[name].title: origin, "folder": str(folder), "next": step})


@app.command("info")
def data_info(path: Annotated[Path, typer.Argument(help="HDF5 file.")]) -> None:
    """Describe a data set: shapes, types, chunks, classes, ranges."""
    from hpcdist.data import describe

    console.facts(describe(path))
