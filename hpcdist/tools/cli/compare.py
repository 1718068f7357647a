"""`hpcdist compare|simulate|sweep`: all runs of a comparison of strategies or settings, their table, their report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hpcdist.errors import LEFT, ConfigError
from hpcdist.tools import completion, console
from hpcdist.tools.cli.base import (
    Config,
    Launcher,
    Overrides,
    Target,
    on_all_ranks,
    read_counts,
    read_number,
    read_target,
)
from hpcdist.tools.compare.plan import Declaration, RunDeclaration, SweepDeclaration, read_budget

if TYPE_CHECKING:
    from hpcdist.tools.compare.run_all import RunPlan

D = TypeVar("D", bound=RunDeclaration)
app = typer.Typer()

JobToBegin = Annotated[
    Path | None,
    typer.Argument(metavar="JOB", help="Python file that defines `job`. Not needed to go on with --output."),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A,B:KEY=VALUE,...",
        help="Strategies to compare. The options of one follow a colon.",
        autocompletion=completion.strategies,
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each strategy on each number of ranks, with other seeds.")]
Tune = Annotated[
    int, typer.Option(min=0, metavar="RUNS", help="First search a learning rate for each strategy, in so many runs.")
]
Rates = Annotated[
    list[str] | None,
    typer.Option(metavar="STRATEGY=RATE", help="Learning rate of one of the --strategies. May be repeated."),
]
Budget = Annotated[
    list[str] | None,
    typer.Option(metavar="UNIT=N", help="When each run ends: samples=N (of all ranks), steps=N or seconds=N."),
]
Evaluations = Annotated[
    int, typer.Option(min=0, help="Evaluations of a run with a budget of samples or steps. 0: after epochs only.")
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each process.")]
Network = Annotated[
    str | None,
    typer.Option(metavar="LATENCY,BANDWIDTH", help="Speed of each link, as 50us,1Gbit/s. Default: 20us,10Gbit/s."),
]
Compute = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Time of a step: SECONDS, jitter:SECONDS,CV, exponential:SECONDS, straggler:RANK,FACTOR,SECONDS, "
        "slow:PART,FACTOR,SECONDS. Default: measured here.",
    ),
]
Cluster = Annotated[
    Path | None, typer.Option(metavar="TOML", help="File with network, intra_network, ranks_per_node, compute.")
]
Slurm = Annotated[
    str | None,
    typer.Option(
        metavar="SITE",
        help="Submit the runs as Slurm's job arrays: a cluster's profile, NAME or TOML.",
        autocompletion=completion.sites,
    ),
]
SlurmSet = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Setting of these jobs, such as time_min=30; may be repeated.",
        autocompletion=completion.specification,
    ),
]


def _output(command: str) -> Any:
    return typer.Option(metavar="FOLDER", help=f"Folder for all files. Default: runs/{command}-JOB, or -2...")


@app.command()
def compare(
    job: JobToBegin = None,
    strategies: Strategies = None,
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of ranks to run on.")] = "1,2",
    seeds: Seeds = 5,
    budget: Budget = None,
    target: Target = None,
    baselines: Annotated[
        str | None, typer.Option(metavar="A,B", help="Compare with other libraries, too: ddp (torch's own), horovod.")
    ] = None,
    tune: Tune = 0,
    rate: Rates = None,
    controls: Annotated[
        bool, typer.Option(help="Also train on one process with the batch of all ranks together.")
    ] = True,
    evaluations: Evaluations = 20,
    config: Config = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, _output("compare")] = None,
    launcher: Launcher = None,
    threads: Threads = 1,
    slurm: Slurm = None,
    slurm_set: SlurmSet = None,
) -> None:
    """Compare strategies on a job: make all runs, one after the other, then show a table and write a report.

    It adds runs on one process, with a batch as large as that of all ranks together. If such a run is as good, the
    larger batch is the reason, not the strategy.

    After an interruption the same command goes on, and so does `hpcdist compare --output FOLDER`: only the missing
    runs are made. If a run fails, the others are still made, and the exit status is 1.

    Example: hpcdist compare jobs/digits.py --strategies allreduce,softsync:splits=2,gossip_pull --ranks 1,2,4
    --budget samples=20000 --target accuracy=0.97
    """
    from hpcdist.tools.compare import experiment
    from hpcdist.tools.compare.comparison import Comparison

    if job is None:
        declared, output = _going_on("comparison", output, strategies, Declaration)
        _require("real", declared, output)
    else:
        declared = experiment.declare(
            job, **_shared(budget, target, config, overrides), **_cells(strategies, ranks, rate), seeds=seeds,
            evaluations=evaluations, baselines=tuple(baselines.split(",")) if baselines else (), tune=tune,
            controls=controls, threads=threads,
        )  # fmt: skip
        declared, output = experiment.place("compare", declared, output)
    _require_slurm(slurm, slurm_set, launcher)
    _by_slurm(lambda: Comparison(declared, output), output, slurm, slurm_set)
    raise typer.Exit(int(experiment.make(declared, output, launcher).failed))


@app.command()
def simulate(
    job: JobToBegin = None,
    strategies: Strategies = None,
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of virtual ranks.")] = "16",
    seeds: Seeds = 1,
    network: Network = None,
    compute: Compute = None,
    cluster: Cluster = None,
    budget: Budget = None,
    target: Target = None,
    tune: Tune = 0,
    rate: Rates = None,
    controls: Annotated[
        bool, typer.Option(help="Also train on one rank, and on one process with the batch of all ranks.")
    ] = True,
    evaluations: Evaluations = 20,
    config: Config = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, _output("simulate")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time. Default: one on each core.")
    ] = None,
) -> None:
    """Compare strategies on virtual ranks, on this machine: the training is real, its network and its time are not.

    All seconds are those that a cluster would need, with such a network and such times of a step.

    After an interruption the same command goes on, and so does `hpcdist simulate --output FOLDER`: only the missing
    runs are made.

    Example: hpcdist simulate jobs/digits.py --ranks 64 --strategies allreduce,softsync:splits=4 --network 50us,10Gbit/s
    --compute jitter:20ms,0.2 --target accuracy=0.97
    """
    from hpcdist.tools.compare import experiment
    from hpcdist.tools.simulate.cluster import read_cluster

    if job is None:
        declared, output = _going_on("simulation", output, strategies, Declaration)
        _require("virtual", declared, output)
    else:
        described = read_cluster(cluster, network, compute)
        declared = experiment.declare(
            job, **_shared(budget, target, config, overrides), **_cells(strategies, ranks, rate), seeds=seeds,
            evaluations=evaluations, tune=tune, controls=controls,
        )  # fmt: skip
        declared, output = experiment.place("simulate", declared, output, described)
    raise typer.Exit(int(experiment.make_virtual(declared, output, workers).failed))


@app.command()
def sweep(
    job: JobToBegin = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES", help="Setting and values: A,B,C or LOW..HIGH[:log][:POINTS]. May be repeated."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Number of combinations to try; a grid has all.")] = 20,
    sampler: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="How combinations are chosen: tpe (near those that were good), random, or grid (all)."
        ),
    ] = "tpe",
    pruner: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Which runs end early: asha (all but the best third, after 1/9 and 1/3 of the evaluations), median "
            "(those worse than the median), or none.",
        ),
    ] = "none",
    strategy: Annotated[
        str,
        typer.Option(metavar="NAME:KEY=VALUE,...", help="Strategy of all runs.", autocompletion=completion.strategies),
    ] = "allreduce",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each run.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each combination, with different seeds.")] = 1,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time. Default: as many as have cores of their own.")
    ] = None,
    budget: Budget = None,
    target: Target = None,
    evaluations: Evaluations = 20,
    config: Config = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, _output("sweep")] = None,
    launcher: Launcher = None,
    threads: Threads = 1,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Run on virtual ranks, as `hpcdist simulate` does.")
    ] = False,
    network: Network = None,
    compute: Compute = None,
    cluster: Cluster = None,
    slurm: Slurm = None,
    slurm_set: SlurmSet = None,
) -> None:
    """Search for good settings of a job: make runs with combinations of values, and show the best first.

    After an interruption the same command goes on, and so does `hpcdist sweep --output FOLDER`: only the missing runs
    are made, and those that have failed. It needs Optuna: pip install 'hpcdist[sweep]'.

    Example: hpcdist sweep jobs/digits.py --over optimizer.lr=0.0001..0.1:log --over batch_size=16,32 --runs 20
    --pruner asha --budget samples=20000
    """
    from hpcdist.tools.compare import experiment
    from hpcdist.tools.compare.sweep import Sweep
    from hpcdist.tools.simulate.cluster import read_cluster

    described = read_cluster(cluster, network, compute) if virtual else None
    if described is None and (cluster, network, compute) != (None, None, None):
        raise ConfigError("--virtual must be given with --network, --compute and --cluster; got none. Add it.")
    if job is None:
        declared, output = _going_on("sweep", output, over, SweepDeclaration)
    else:
        if not over:
            raise ConfigError("--over must be given to begin a sweep; got none. Such as --over batch_size=16,32.")
        declared = experiment.declare_sweep(
            job, over, runs, **_shared(budget, target, config, overrides), strategy=strategy, sampler=sampler,
            pruner=pruner, ranks=ranks, seeds=seeds, evaluations=evaluations, threads=threads,
        )  # fmt: skip
        declared, output = experiment.place("sweep", declared, output, described)
    _require_slurm(slurm, slurm_set, launcher)
    if declared.virtual is not None and (slurm is not None or launcher is not None):
        raise ConfigError("--slurm and --launcher must be left out with virtual ranks; got one of them. Remove it.")
    found = Sweep(declared, output)
    _by_slurm(lambda: found, output, slurm, slurm_set, jobs)
    raise typer.Exit(int(experiment.make_sweep(found, launcher, jobs)))


@app.command(hidden=True)
@on_all_ranks
def trial(
    output: Annotated[Path, typer.Option(envvar="HPCDIST_RUN", help="Folder of the run.")],
) -> None:
    """Make a run of a sweep on the ranks that mpirun or srun started. Collective. `hpcdist sweep` calls it."""
    from hpcdist import session
    from hpcdist.comm.launch import job_end
    from hpcdist.tools.compare.trial import train

    comm = session.init(run=False)
    folder, summary = train(comm, output, None, job_end(os.environ) if comm.rank == 0 else None, sys.argv)
    if summary is None:
        raise typer.Exit(LEFT)
    if comm.rank == comm.failures.living[0]:
        console.result(folder, summary)


# --- arguments --------------------------------------------------------------------------------------------------------
def _going_on(noun: str, output: Path | None, beginning: object, kind: type[D]) -> tuple[D, Path]:
    """Read the declaration in the folder `output`, with which a command without a job goes on.

    Args:
        beginning: an option that only a command has which begins.
    """
    from hpcdist.tools.compare import folder

    if output is None or beginning:
        raise ConfigError(f"JOB must be given to begin a {noun}; got none. It is a file such as jobs/digits.py.")
    return folder.declared_in(output, kind), output


def _require(kind: str, declared: Declaration, output: Path) -> None:
    """Refuse to go on with a comparison on ranks of the other kind."""
    there, command = ("real", "compare") if declared.virtual is None else ("virtual", "simulate")
    if kind != there:
        raise ConfigError(
            f"--output must hold a comparison on {kind} ranks; got {output}, on {there} ones. Go on with it by "
            f"`hpcdist {command} --output {output}`."
        )


def _require_slurm(slurm: str | None, slurm_set: Sequence[str] | None, launcher: str | None) -> None:
    """Check that options of Slurm's jobs fit together."""
    if slurm is not None and launcher is not None:
        raise ConfigError(f"--launcher must be left out with --slurm, whose profile has its own; got {launcher!r}.")
    if slurm is None and slurm_set:
        raise ConfigError("--slurm must be given with --slurm-set; got none. Such as --slurm generic.")


def _by_slurm(
    plan: Callable[[], RunPlan],
    output: Path,
    slurm: str | None,
    slurm_set: Sequence[str] | None,
    at_once: int | None = None,
) -> None:
    """Submit the runs of a plan if so asked, or show those that Slurm still has, and exit; else do nothing."""
    from hpcdist.tools.slurm import arrays

    if slurm is not None:
        raise typer.Exit(int(arrays.submit_missing(plan(), slurm, slurm_set or [], at_once)))
    if waiting := arrays.under_way(output):
        raise typer.Exit(int(arrays.show(plan(), waiting)))


def _cells(strategies: Sequence[str] | None, ranks: str, rate: Sequence[str] | None) -> dict[str, Any]:
    """Read the options of a comparison that say which strategies run, on how many ranks, by what rates."""
    return {
        "strategies": strategies or ["allreduce"],
        "ranks": read_counts("--ranks", ranks),
        "rates": dict(read_number("--rate", "STRATEGY=RATE", "allreduce=0.01", item) for item in rate or []),
    }


def _shared(
    budget: Sequence[str] | None, target: str | None, config: Path | None, overrides: Sequence[str] | None
) -> dict[str, Any]:
    """Read the options that comparisons and sweeps have."""
    return {
        "budget": read_budget(budget or []),
        "target": None if target is None else read_target(target),
        "config": config,
        "settings": overrides or [],
    }
