"""The command line: `hpcdist train|data|bench|slurm|...`.

One file per group of commands; each command parses its arguments, calls one function and prints the result. Commands
are plug-ins: the `app` (a typer.Typer) of a file here, or an entry point of the group `hpcdist.commands`, which names
an `app` or a function. Commands of an `app` with a name stand under that name.

Modules that need torch are imported inside the commands that need them: torch takes seconds to import, and `--help`
should be fast.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from typing import Annotated, Any

import typer

from hpcdist import __version__, log
from hpcdist.comm.launch import LAUNCHERS, task_or_none
from hpcdist.errors import INTERRUPTED, LEFT, NO_SPACE, ConfigError, HpcdistError, OutputError
from hpcdist.faults.reporter import SILENT_S, is_reporter
from hpcdist.registry import catalogue
from hpcdist.tools import completion, console
from hpcdist.tools.cli.base import HELP, CommandGroup, prepare_help

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes and columns leave little room on narrow terminals
    context_settings={"help_option_names": HELP},
    help="Train PyTorch models over MPI with any distribution strategy, and measure what it costs.",
)
COLLECTIVE: set[str] = set()  # commands that all ranks run; the first rank runs the others alone
_format_warning = warnings.formatwarning
EXIT_WAIT_S = 2.0  # for the other ranks' processes to end
RANK_VARIABLES = tuple(dict.fromkeys(variables.rank for variables in LAUNCHERS))


def main() -> None:
    """Run the command line and exit.

    A failure is reported once, by one rank, and ends every rank. Exit status: 2 for wrong usage, 1 for an error, 75 for
    a run that left early, 130 for an interruption. Only unexpected exceptions, not HpcdistErrors, print a traceback.
    """
    if completion.VARIABLE in os.environ:
        completion.complete(typer.main.get_command(app))
        sys.exit()
    first = launched_rank() == 0
    is_collective = len(sys.argv) > 1 and sys.argv[1] in COLLECTIVE and not {*HELP} & set(sys.argv)
    status = _run(sys.argv[1:], first) if first or is_collective else 0
    if status == INTERRUPTED and first:
        console.note("interrupted")
    comm = _communicator_or_none()
    if status and comm is not None and comm.size > 1:
        if status != LEFT:
            comm.abort(status)
        status = _end_other_ranks_first(comm)
    sys.exit(status)


def _end_other_ranks_first(comm: Any) -> int:
    """Collective. End all ranks but the first with status 0; the first waits for that, and returns LEFT.

    Reason: at a rank's first nonzero status, `srun --kill-on-bad-exit` kills the other ranks, and reports them killed.
    """
    from hpcdist.comm.mpi.world import finalise

    first = comm.rank == comm.failures.alive[0]
    finalise()
    if not first:
        sys.stdout.flush()
        sys.stderr.flush()
        if (task := task_or_none(os.environ)) is not None and "mpiexec" in task.launcher:
            return 0  # MPICH's mpiexec would return 0 for all ranks after an exit without exit handlers
        os._exit(0)  # a normal exit takes seconds with torch on a busy node
    time.sleep(EXIT_WAIT_S)
    return LEFT


def _run(arguments: list[str], first: bool) -> int:
    """Run a command, print its error if it fails, and return its exit status. The first rank reports wrong usage."""
    command = typer.main.get_command(app)  # calling `app` would replace sys.excepthook
    prepare_help(command)
    try:
        return command.main(arguments, prog_name="hpcdist", standalone_mode=first) or 0
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except HpcdistError as error:
        _report(error, first)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try to flush its buffer again
        _report(OutputError.of(error.filename or "standard output", error), first)
        return 1
    except Exception as error:
        if first or not hasattr(error, "exit_code"):  # typer's exceptions for wrong usage
            raise
        time.sleep(SILENT_S)  # the first rank reports it, and ends this one
        return error.exit_code


def _report(error: HpcdistError, first: bool) -> None:
    """Print an error on one of the ranks that raised it; the others wait to be ended by that rank."""
    comm = _communicator_or_none()
    if comm is None and not first:  # without a communicator, all ranks raise the same error
        time.sleep(SILENT_S)
        return
    if comm is None or comm.size == 1 or is_reporter(comm.rank):
        console.error(str(error))


def launched_rank() -> int:
    """Return this process's rank from its launcher's environment variables; 0 without a launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def _communicator_or_none() -> Any:
    """Return the communicator of all ranks; None if this process has not joined one."""
    world = sys.modules.get("hpcdist.session.world")
    return None if world is None else world.joined()


def _print_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    log.set_up()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns if it can't write to the user's home
    warnings.formatwarning = _as_note


def _as_note(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning of hpcdist without its source line, which is of no use to users."""
    if filename.startswith(os.path.dirname(log.__file__)):
        return f"hpcdist: {message}\n"
    return _format_warning(message, category, filename, lineno, line)


def _add_commands() -> None:
    """Add the commands of all plug-ins; skip one that can't be imported, with a note."""
    plugins = catalogue("commands")
    for name in plugins.available():
        try:
            plugin = plugins.load(name)
        except ConfigError as error:
            if launched_rank() == 0:
                console.note(f"command {name} is skipped: {error}")
            continue
        if not isinstance(plugin, typer.Typer):
            app.command(name)(plugin)
            commands = {name: plugin}
        else:
            app.add_typer(plugin)
            commands = {plugin.info.name: plugin} if plugin.info.name else _functions(plugin)
        COLLECTIVE.update(name for name, command in commands.items() if hasattr(command, "on_all_ranks"))


def _functions(group: typer.Typer) -> dict[str, Any]:
    """Return the Python function of each of an app's commands, by the command's name."""
    functions: list[tuple[Any, Any]] = [(command.name, command.callback) for command in group.registered_commands]
    return {name or typer.main.get_command_name(function.__name__): function for name, function in functions}


_add_commands()
