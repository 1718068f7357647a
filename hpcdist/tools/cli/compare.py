"""`hpcdist compare|simulate|sweep`: run an experiment, print its table, write its report.

The options are the fields of `Comparison`, `Sweep` and `Execution`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from annotated_types import Interval
from typer.core import TyperCommand

from hpcdist.errors import LEFT
from hpcdist.tools import console
from hpcdist.tools.cli.base import on_all_ranks, whole_number
from hpcdist.tools.compare.experiment import Comparison, Execution, Experiment, Sweep
from hpcdist.tools.options import Config, Overrides, Target, argument, flag, option

app = typer.Typer()


class _Command(TyperCommand):
    """A command whose job may be a script; an unknown option's error says where a script's options stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # the parser consumes `args`
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption" and "--" not in words:
                cast(Any, error).message += "; arguments of a script follow --: train.py --ranks 2 -- --epochs 3"
            raise


@dataclass
class _Sources:
    """Options that are not fields of an experiment, but from which its fields are computed."""

    job: Annotated[
        Path | None, argument("JOB", "File that defines `job`, or a script; not needed to resume with --output.")
    ] = None
    arguments: Annotated[
        list[str] | None, argument("ARGS", "Arguments of a script, after --; {seed} is replaced by the run's seed.")
    ] = None
    target: Target = None
    config: Config = None
    settings: Overrides = None
    virtual: Annotated[bool, flag("--virtual", "Run on virtual ranks, as `hpcdist simulate` does.")] = False
    network: Annotated[
        str | None, option("LATENCY,BANDWIDTH", "Speed of each link, as 50us,1Gbit/s. Default: 20us,10Gbit/s.")
    ] = None
    compute: Annotated[
        str | None,
        option(
            "MODEL",
            "Time of a step: SECONDS, jitter:SECONDS,CV, exponential:SECONDS, straggler:RANK,FACTOR,SECONDS, "
            "slow:PART,FACTOR,SECONDS. Default: measured here.",
        ),
    ] = None
    cluster: Annotated[Path | None, option("TOML", "File with network, intra_network, ranks_per_node, compute.")] = None
    workers: Annotated[int | None, whole_number("Concurrent runs. Default: one per core.")] = None


def _experiment(kind: type[Experiment], names: str, **defaults: Any) -> Callable[[Callable[[], None]], None]:
    """Return a decorator that turns an empty function into a command with the function's name and docstring.

    Args:
        names: the options, separated by blanks: fields of `kind`, Execution or _Sources.
        defaults: replace defaults of the fields. For fields with several values typer gets a list of texts, whose
            default is the one given here, or None.
    """
    hints: dict[str, Any] = {}
    field_defaults: dict[str, Any] = {}
    for cls in (kind, Execution, _Sources):
        hints |= get_type_hints(cls, include_extras=True)
        field_defaults |= {f.name: f.default for f in fields(cls)}

    def option(name: str, command: str) -> inspect.Parameter:
        """Return the parameter from which typer creates an option."""
        value, *metadata = get_args(hints[name])
        info = copy(next(item for item in metadata if isinstance(item, typer.models.ParameterInfo)))
        info.help = str(info.help).replace("COMMAND", command)
        info.min = next((cast(int, item.ge) for item in metadata if isinstance(item, Interval)), info.min)
        default = defaults.get(name, field_defaults[name])
        if get_origin(value) in (tuple, Mapping):
            value, default = list[str] | None, defaults.get(name)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, info]
        )

    def add(described: Callable[[], None]) -> None:
        @wraps(described)
        def command(**options: Any) -> None:
            from hpcdist.tools.compare.functions import run

            raise typer.Exit(int(run(described.__name__, **options).failed))

        parameters = [option(name, described.__name__) for name in names.split()]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        app.command(cls=_Command)(command)

    return add


@_experiment(
    Comparison,
    "job arguments strategies ranks seeds budget target baselines tune rates controls evaluations config settings "
    "output launcher threads slurm slurm_set",
    ranks=["1,2"],
    seeds=None,
)
def compare() -> None:
    """Compare strategies on a job: run all combinations, then print a table and write a report.

    Serial controls are added: one process with a batch as large as that of all ranks together. If a control is as good,
    the larger batch is the reason, not the strategy.

    After an interruption the same command, or `hpcdist compare --output FOLDER`, resumes: only the missing runs are
    executed. If a run fails, the others continue, and the exit status is 1.

    Example: hpcdist compare jobs/digits.py --strategies allreduce,softsync:splits=2,gossip_pull --ranks 1,2,4 --budget
    samples=20000 --target accuracy=0.97
    """


@_experiment(
    Comparison,
    "job arguments strategies ranks seeds network compute cluster budget target tune rates controls evaluations config "
    "settings output workers",
    ranks=["16"],
    seeds=1,
)
def simulate() -> None:
    """Compare strategies on virtual ranks on this machine: training is real, network and time are simulated.

    All seconds are those of a cluster with the given network and step times.

    After an interruption the same command, or `hpcdist simulate --output FOLDER`, resumes: only the missing runs are
    executed.

    Example: hpcdist simulate jobs/digits.py --ranks 64 --strategies allreduce,softsync:splits=4 --network 50us,10Gbit/s
    --compute jitter:20ms,0.2 --target accuracy=0.97
    """


@_experiment(
    Sweep,
    "job arguments over trials sampler pruner strategy ranks seeds jobs budget target evaluations config settings "
    "output launcher threads virtual network compute cluster slurm slurm_set",
)
def sweep() -> None:
    """Search for good settings of a job: run it with combinations of values, and list the best first.

    After an interruption the same command, or `hpcdist sweep --output FOLDER`, resumes: only missing and failed runs
    are executed. It needs Optuna: pip install 'hpcdist[sweep]'.

    Example: hpcdist sweep jobs/digits.py --over optimizer.lr=0.0001..0.1:log --over batch_size=16,32 --runs 20 --pruner
    asha --budget samples=20000
    """


@app.command(hidden=True)
@on_all_ranks
def trial(output: Annotated[Path, typer.Option(envvar="HPCDIST_RUN", help="Folder of the run.")]) -> None:
    """Execute one run of a sweep, or of a script, on the ranks that compare, simulate or sweep started. Collective."""
    from hpcdist import session
    from hpcdist.comm.launch import job_end
    from hpcdist.tools.compare.trials import find_script, train
    from hpcdist.tools.simulate.launcher import Simulation

    if (script_run := find_script(output)) is not None:
        experiment, run, call = script_run  # `call` executes the script
        if experiment.virtual is None:
            call()
        else:
            Simulation.of(experiment).train(run, output, call)
        return
    comm = session.init(run=False)  # the trainer writes the run's files
    folder, summary = train(comm, output, job_end(os.environ) if comm.rank == 0 else None, sys.argv)
    if summary is None:
        raise typer.Exit(LEFT)  # the run has saved, to be resumed
    if comm.rank == comm.failures.alive[0]:
        console.result(folder, summary)
