"""The command line: `hpcdist train|data|bench|strategies|report`. Parses, builds a specification, calls one function."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hpcdist import __version__, console, session
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.session.world import joined

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=__doc__)
data_app = typer.Typer(no_args_is_help=True, help="Data sets in HDF5.")
app.add_typer(data_app, name="data")

Overrides = Annotated[
    Optional[list[str]], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
]


def main() -> None:
    """Runs the command line; an error of hpcdist's is one message, without a traceback, and ends every rank."""
    try:
        app()
    except HpcdistError as error:
        comm = joined()
        if comm is not None:
            time.sleep(min(0.2 * comm.rank, 2.0))  # where all ranks fail alike the lowest speaks and ends the job
        console.error(str(error))
        if comm is not None and comm.size > 1:
            comm.abort(1)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="Python file that defines `job`, such as jobs/digits.py.")],
    config: Annotated[Optional[Path], typer.Option(help="TOML file of settings.")] = None,
    overrides: Overrides = None,
    output: Annotated[Optional[Path], typer.Option(help="Folder of this run; by default a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    progress: Annotated[str, typer.Option(help="auto, live, lines or off.")] = "auto",
) -> None:
    """Train a job on the ranks that mpirun or srun started. Collective."""
    from hpcdist.train import runs

    comm = session.init()
    runs.train(comm, job, config, overrides or [], output, resume, console.progress(progress))


@app.command()
def strategies() -> None:
    """List the strategies with their options and references."""
    from hpcdist import strategies as catalogue

    console.strategies([catalogue.load(name) for name in catalogue.available()], catalogue.available())


@app.command()
def report(folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold some.")]) -> None:
    """Compare runs in one table."""
    from hpcdist.records import load_summary

    found = sorted({path.parent for folder in folders for path in folder.glob("**/summary.json")})
    if not found:
        raise ConfigError(f"folders must hold a run's summary.json; got {', '.join(map(str, folders))}.")
    console.runs([(path, load_summary(path)) for path in found])


@data_app.command("import")
def data_import(
    name: Annotated[str, typer.Argument(help="Importer: digits, mnist, cifar10, images, table...")],
    source: Annotated[str, typer.Argument(help="File or folder to read; `sklearn` for digits.")],
    destination: Annotated[Path, typer.Argument(help="HDF5 file to write.")],
    overrides: Overrides = None,
) -> None:
    """Write a data set as HDF5. Options of the importer are given with --set."""
    from hpcdist.config import load
    from hpcdist.data import describe, importers

    convert = importers.load(name)
    options = _checked_options(convert, load({}, None, overrides or []))
    console.facts(describe(convert(source, destination, **options)))


@data_app.command("info")
def data_info(path: Annotated[Path, typer.Argument(help="HDF5 file.")]) -> None:
    """Describe a data set: shapes, types, chunks, classes, ranges."""
    from hpcdist.data import describe

    console.facts(describe(path))


def _checked_options(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The keyword-only options of a function, checked against its signature."""
    from pydantic import create_model

    from hpcdist.config import Settings

    hints = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {
        p.name: (hints[p.name], p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    return create_model("Options", __base__=Settings, **fields).from_mapping(given).model_dump()


if __name__ == "__main__":
    main()
