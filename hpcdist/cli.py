"""The command line: `hpcdist train|data|bench|slurm|...`. Parses, builds a specification, calls one function.

Modules that need torch are imported by the commands that need them: it takes seconds, and `--help` should take none.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hpcdist import __version__, console
from hpcdist.bench import commands
from hpcdist.comm.launch import LAUNCHERS
from hpcdist.doctor.commands import doctor
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.horovod import commands as horovod_commands
from hpcdist.slurm import commands as slurm_commands

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train PyTorch models over MPI with any distribution strategy, and measure what it costs.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets in HDF5.")
app.add_typer(data_app, name="data")
app.add_typer(commands.app, name="bench")
app.add_typer(horovod_commands.app, name="horovod")
app.command()(doctor)
app.add_typer(slurm_commands.app, name="slurm")

Overrides = Annotated[
    Optional[list[str]], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
]

COLLECTIVE = {"train", "bench", "doctor"}  # what all ranks take part in; the first one alone does the rest
SILENT_S = 10.0  # in which the first rank speaks: a launcher ends all ranks when one of them leaves with a failure
SETTLED_S = 2.0  # by then the other ranks' processes have ended
LEFT = 75  # of a run that left early and is to be started again: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # as the shell's for a process that SIGINT ended
RANK_VARIABLES = tuple(dict.fromkeys(variables.rank for variables in LAUNCHERS))


def main() -> None:
    """Runs the command line of this process and exits.

    A failure is told once, whether one rank fails or all do, and ends every rank: status 2 for wrong usage, 1 for an
    error, 75 for a run that left early, 130 for an interruption. Only an exception that is no HpcdistError has a
    traceback.
    """
    first = launched_rank() == 0
    status = _run(sys.argv[1:], first) if first or _is_collective(sys.argv[1:]) else 0
    if status == INTERRUPTED and first:
        console.note("interrupted")
    comm = _joined()
    if status and comm is not None and comm.size > 1:
        if status != LEFT:
            comm.abort(status)
        status = _leave_in_turn(comm)
    sys.exit(status)


def _leave_in_turn(comm) -> int:
    """Collective. The status to leave with, which the first rank gives when the others have left.

    At the first status other than 0 `srun --kill-on-bad-exit` kills the ranks that are still there, and reports that.
    """
    from hpcdist.comm import mpi

    first = comm.rank == comm.living[0]
    mpi.finalise()
    if not first:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # to take the interpreter down with torch in it takes seconds on a busy node
    time.sleep(SETTLED_S)
    return LEFT


def _run(arguments: list[str], first: bool) -> int:
    """The exit status. All ranks have the same arguments, so that the first one alone speaks of wrong ones."""
    command = typer.main.get_command(app)  # called itself, `app` would put typer's hook in place of sys.excepthook
    try:
        return command.main(arguments, prog_name="hpcdist", standalone_mode=first) or 0
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except HpcdistError as error:
        _tell(error, first)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if first or not hasattr(error, "exit_code"):  # which typer's exceptions for wrong usage have
            raise
        time.sleep(SILENT_S)
        return error.exit_code


def _tell(error: HpcdistError, first: bool) -> None:
    comm = _joined()
    if comm is None and not first:  # what is refused before the ranks have found each other, all refuse
        time.sleep(SILENT_S)
        return
    if comm is not None and comm.rank > 0:
        # Where all ranks fail alike the lowest one speaks and ends the job meanwhile.
        time.sleep(min(1.0 + 0.25 * comm.rank, 3.0))
    console.error(str(error))


def _is_collective(arguments: list[str]) -> bool:
    return bool(arguments) and arguments[0] in COLLECTIVE and "--help" not in arguments


def launched_rank() -> int:
    """This process's number according to its launcher; 0 without one."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def _joined():
    """The communicator of all ranks; None where this process has not joined them."""
    world = sys.modules.get("hpcdist.session.world")
    return None if world is None else world.joined()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="Python file that defines `job`, such as jobs/digits.py.")],
    config: Annotated[Optional[Path], typer.Option(metavar="TOML", help="File of settings.")] = None,
    overrides: Overrides = None,
    output: Annotated[
        Optional[Path], typer.Option(metavar="FOLDER", help="This run's folder; by default a new one in runs/.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output; without one start anew.")
    ] = False,
    progress: Annotated[
        console.ProgressMode,
        typer.Option(help="One line that is rewritten, or lines; auto: live on a terminal with one rank, else lines."),
    ] = console.ProgressMode.auto,
) -> None:
    """Train a job on the ranks that mpirun or srun started. Collective.

    On SIGTERM, SIGUSR1 or SIGUSR2, and before a Slurm job's time limit, all ranks save a checkpoint and leave after
    the same step, with status 75: the same command with --resume goes on.
    """
    from hpcdist import session
    from hpcdist.slurm.environment import end_time
    from hpcdist.train import runs

    comm = session.init()
    show = console.progress(progress, comm.size)
    ends_at = end_time(os.environ) if comm.rank == 0 else None
    folder, summary = runs.train(comm, job, config, overrides or [], output, resume, show, console.note, ends_at)
    if summary is None:
        raise typer.Exit(LEFT)
    if comm.rank == comm.living[0]:
        console.result(folder, summary)


@app.command()
def strategies() -> None:
    """List the strategies with their options and references."""
    from hpcdist import strategies as catalogue

    console.algorithms({name: catalogue.load(name) for name in catalogue.available()}, "strategy")


@app.command()
def compressors() -> None:
    """List the compressors with their options and references. Each is a strategy's `compression`."""
    from hpcdist import compress as catalogue

    console.algorithms({name: catalogue.load(name) for name in catalogue.available()}, "strategy.compression")


@app.command()
def topology(
    name: Annotated[str, typer.Argument(help="Topology, such as ring or torus; an unknown name lists all.")],
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of ranks.")],
    overrides: Overrides = None,
    output: Annotated[
        Optional[Path], typer.Option(metavar="FILE.svg|png", help="Draw it there, too; needs matplotlib.")
    ] = None,
) -> None:
    """Who averages with whom: checks of the weights, the spectral gap, neighbours. Options are given with --set."""
    from hpcdist import topology as catalogue
    from hpcdist.config import checked_options, load
    from hpcdist.topology import drawing

    make = catalogue.load(name)
    found = make(ranks, **checked_options(make.__init__, load({}, None, overrides or [])))
    if output is not None:
        drawing.draw(found, output)
    console.topology(found)


@app.command()
def report(folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold some.")]) -> None:
    """Compare runs in one table."""
    from hpcdist.records import load_summary

    found = list(dict.fromkeys(path.parent for folder in folders for path in sorted(folder.glob("**/summary.json"))))
    if not found:
        raise ConfigError(
            f"folders must hold a run's summary.json; got none in {', '.join(map(str, folders))}. A run writes it at "
            "its end."
        )
    console.runs({folder: load_summary(folder) for folder in found})


@data_app.command("import")
def data_import(
    name: Annotated[str, typer.Argument(help="Importer, such as digits or images; an unknown name lists all.")],
    source: Annotated[str, typer.Argument(help="File or folder to read; `sklearn` for digits.")],
    destination: Annotated[Path, typer.Argument(help="HDF5 file to write.")],
    overrides: Overrides = None,
) -> None:
    """Write a data set as HDF5. Options of the importer are given with --set."""
    from hpcdist.config import checked_options, load
    from hpcdist.data import describe, importers

    convert = importers.load(name)
    options = checked_options(convert, load({}, None, overrides or []))
    console.facts(describe(convert(source, destination, **options)))


@data_app.command("info")
def data_info(path: Annotated[Path, typer.Argument(help="HDF5 file.")]) -> None:
    """Describe a data set: shapes, types, chunks, classes, ranges."""
    from hpcdist.data import describe

    console.facts(describe(path))
