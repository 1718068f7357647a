"""`hpcdist simulate`: a job on virtual ranks, as many as one likes, on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import ConfigError
from hpcdist.tools import console
from hpcdist.tools.cli import compare
from hpcdist.tools.cli.options import Overrides, Target

MODELS = "SECONDS, jitter:SECONDS,CV, exponential:SECONDS, straggler:RANK,FACTOR,SECONDS, slow:PART,FACTOR,SECONDS"


def simulate(
    job: compare.JobToBegin = None,
    strategies: compare.Strategies = None,
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of virtual ranks.")] = "16",
    seeds: compare.Seeds = 1,
    network: Annotated[
        str | None,
        typer.Option(metavar="LATENCY,BANDWIDTH", help="Speed of each link, as 50us,1Gbit/s. Default: 20us,10Gbit/s."),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help=f"Time of a step: {MODELS}. Default: measured here."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="TOML", help="File with network, intra_network, ranks_per_node, compute."),
    ] = None,
    budget: compare.Budget = None,
    target: Target = None,
    tune: compare.Tune = 0,
    rate: compare.Rates = None,
    controls: Annotated[
        bool, typer.Option(help="Also train on one rank, and on one process with the batch of all ranks.")
    ] = True,
    evaluations: compare.Evaluations = 20,
    config: compare.Config = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for all files. Default: runs/simulate-JOB.")
    ] = None,
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
    from hpcdist.tools.compare import conduct, folder
    from hpcdist.tools.compare.comparison import Comparison
    from hpcdist.tools.compare.plan import Declaration
    from hpcdist.tools.simulate.cluster import read_cluster
    from hpcdist.tools.simulate.making import Simulation, VirtualRuns, on_cluster
    from hpcdist.tools.simulate.table import table

    if job is None:
        if output is None or strategies:
            raise ConfigError("JOB must be given to begin a simulation; got none. It is a file such as jobs/digits.py.")
        declared = folder.declared_in(output, Declaration)
        if declared.virtual is None:
            raise ConfigError(
                f"--output must hold a comparison on virtual ranks; got {output}, on real ones. Go on with it by "
                f"`hpcdist compare --output {output}`."
            )
    else:
        described = read_cluster(cluster, network, compute)
        declared = compare.declare(
            job, strategies, ranks, budget, target, rate, config, overrides, seeds=seeds, evaluations=evaluations,
            tune=tune, controls=controls,
        )  # fmt: skip
        output = output or Path("runs") / f"simulate-{job.stem}"
        declared = on_cluster(declared, described, output)
    comparison = Comparison(declared, output)
    simulation = Simulation.of(declared, sys.argv)
    console.note(str(simulation))
    processes = min(workers or len(os.sched_getaffinity(0)), len(comparison.cells) * declared.seeds)
    makes = VirtualRuns(simulation, processes)
    try:
        failed = conduct.make(comparison, {"strategy": makes, "serial": makes}, processes, table)
    finally:
        makes.close()
    raise typer.Exit(int(failed))
