"""Comparisons and sweeps from Python and from the command line: `hpcdist.compare`, `simulate`, `sweep`.

Both go one way, so that script and command go on with each other's folders.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpcdist.errors import ConfigError
from hpcdist.session import world
from hpcdist.tools import console
from hpcdist.tools.compare import folder
from hpcdist.tools.compare.comparison import ComparedRuns
from hpcdist.tools.compare.experiment import Comparison, Execution, Sweep
from hpcdist.tools.compare.launchers import mpi_launcher, share_cores
from hpcdist.tools.compare.run_all import MadeRuns, run_all
from hpcdist.tools.compare.sweep import SweptRuns
from hpcdist.tools.simulate.cluster import read_cluster
from hpcdist.tools.simulate.launcher import Simulation, VirtualLauncher
from hpcdist.tools.simulate.step_time import on_cluster
from hpcdist.tools.slurm import arrays

NOUNS = {"compare": "comparison", "simulate": "simulation", "sweep": "sweep"}


def compare(
    job: str | Path | Callable[..., Any],
    strategies: Sequence[str] = ("allreduce",),
    ranks: Sequence[int] = (1, 2),
    seeds: int | None = None,
    *,
    output: str | Path | None = None,
    launcher: str | None = None,
    **options: Any,
) -> ComparedRuns:
    """Compare strategies on a job, as `hpcdist compare` does; only runs that are missing in the folder are made.

    Args:
        job: path of a Python file that defines `job`, or of a script with its own training loop; or a function with
            such a loop, which ranks import from its file. Parameters called `seed`, `strategy` and `run` (a folder) get
            the run's.
        strategies: each `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.
        ranks: numbers of ranks to run on.
        seeds: runs of each strategy on each number of ranks; None: 5, or 1 where a script is given no seed.
        output: folder for all files; None: runs/compare-JOB, or -2 and so on if that holds other settings.
        launcher: command that starts ranks, such as `srun --mpi=pmix -n`; None: mpirun.
        options: of the command, under the names of the fields of `Comparison` and `Execution`, and `config`. A budget
            is a table, as `{"samples": 20000}`, so are the rates; a target is `("accuracy", 0.97)`.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another comparison.
    """
    return run(
        "compare", job, strategies=strategies, ranks=ranks, seeds=seeds, output=output, launcher=launcher, **options
    )


def simulate(
    job: str | Path | Callable[..., Any],
    strategies: Sequence[str] = ("allreduce",),
    ranks: Sequence[int] = (16,),
    seeds: int = 1,
    *,
    network: str | None = None,
    compute: str | None = None,
    cluster: str | Path | None = None,
    output: str | Path | None = None,
    workers: int | None = None,
    **options: Any,
) -> ComparedRuns:
    """Compare strategies on virtual ranks, as `hpcdist simulate` does; see `compare`.

    Args:
        network: speed of each link, as `50us,1Gbit/s`.
        compute: time of a step, as `jitter:20ms,0.2`; None: measured here.
        cluster: TOML file with network, intra_network, ranks_per_node, compute.
        workers: runs at the same time; None: one on each core.
    """
    where: dict[str, Any] = {
        "network": network,
        "compute": compute,
        "cluster": cluster,
        "output": output,
        "workers": workers,
    }
    return run("simulate", job, strategies=strategies, ranks=ranks, seeds=seeds, **where, **options)


def sweep(
    job: str | Path | Callable[..., Any],
    over: Mapping[str, str | Sequence[object]],
    runs: int = 20,
    *,
    jobs: int | None = None,
    output: str | Path | None = None,
    launcher: str | None = None,
    **options: Any,
) -> SweptRuns:
    """Search for good settings of a job, as `hpcdist sweep` does; only runs that are missing in the folder are made.

    Args:
        job: see `compare`; the settings of a function are its parameters.
        over: settings with their values: a list, or a text as `--over` takes it, such as `0.001..0.1:log`.
        runs: number of combinations to try; the sampler `grid` tries all.
        jobs: runs at the same time; None: as many as have cores of their own.
        output: folder for all files; None: runs/sweep-JOB, or -2 and so on if that holds other settings.
        launcher: see `compare`.
        options: of the command, under the names of the fields of `Sweep` and `Execution`, and those of `simulate` with
            `virtual=True`.

    Raises:
        ConfigError: a setting is wrong, Optuna is not installed, or the folder holds another sweep.
    """
    return run("sweep", job, over=over, trials=runs, jobs=jobs, output=output, launcher=launcher, **options)


def run(
    command: str,
    job: str | Path | Callable[..., Any] | None,
    *,
    virtual: bool = False,
    network: str | None = None,
    compute: str | None = None,
    cluster: str | Path | None = None,
    workers: int | None = None,
    **given: Any,
) -> Any:
    """Make the runs of an experiment that are missing, or submit them to Slurm, or show those that Slurm still has.

    Args:
        command: compare, simulate or sweep.
        job: None to go on with the experiment in the folder `output`.
        workers: the same as `jobs`.
        given: fields of Execution and of the command's experiment, as `Experiment.of` reads them.

    Returns:
        The `MadeRuns` of the command.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another experiment, or none to go on with.
    """
    if world.planned() is not None:
        raise ConfigError(
            f"hpcdist.{command} must not be called by what it trains; got a call while that file runs. Put it under "
            '`if __name__ == "__main__":`, or into another file.'
        )
    how = Execution(**{f.name: given.pop(f.name) for f in fields(Execution) if f.name in given})
    kind: type[Any]  # of Experiment
    kind, made = (Sweep, SweptRuns) if command == "sweep" else (Comparison, ComparedRuns)
    described = None
    if virtual or command == "simulate":
        described = read_cluster(None if cluster is None else Path(cluster), network, compute)
    elif (cluster, network, compute) != (None, None, None):
        raise ConfigError("--virtual must be given with --network, --compute and --cluster; got none. Add it.")
    if job is None:
        output, experiment = _in_folder(command, kind, how.output, given)
    else:
        if command == "sweep" and not given["over"]:
            raise ConfigError("--over must be given to begin a sweep; got none. Such as --over batch_size=16,32.")
        experiment = kind.of(job, virtual=None if described is None else described.model_dump(), **given)
        output = Path(how.output or folder.default(Path("runs") / f"{command}-{Path(experiment.job).stem}", experiment))
        experiment = experiment if described is None else on_cluster(experiment, described, output)
    if experiment.virtual is not None and (how.slurm is not None or how.launcher is not None):
        raise ConfigError("--slurm and --launcher must be omitted with virtual ranks; got one of them. Remove it.")
    runs = made(experiment, output)
    if how.slurm is not None:
        runs.failed = arrays.submit_missing(runs, how.slurm, how.slurm_set or (), how.jobs)
    elif waiting := arrays.pending(output):
        runs.failed = arrays.show(runs, waiting)
    else:
        runs.failed = _make_here(runs, how.launcher, how.jobs or workers)
    return runs


def _in_folder(command: str, kind: type[Any], output: str | Path | None, given: Mapping[str, Any]) -> tuple[Path, Any]:
    """Read the experiment in the folder `output`, with which a command without a job goes on; return both."""
    if output is None or given.get("over" if command == "sweep" else "strategies"):
        raise ConfigError(
            f"JOB must be given to begin a {NOUNS[command]}; got none. It is a file such as jobs/digits.py."
        )
    output = Path(output)
    found = folder.read_experiment(output, kind)
    if found.command != command:
        wanted, there = ("real", "virtual") if command == "compare" else ("virtual", "real")
        raise ConfigError(
            f"--output must hold a comparison on {wanted} ranks; got {output}, on {there} ones. Go on with it by "
            f"`hpcdist {found.command} --output {output}`."
        )
    return output, found


def _make_here(runs: MadeRuns, launcher: str | None, jobs: int | None) -> bool:
    """Make the runs that are missing, on real or virtual ranks of this machine; return whether one failed.

    Args:
        jobs: runs at the same time. None: one, for comparisons on real ranks and where a launcher may start ranks
            elsewhere; else as many as have cores of their own.
    """
    experiment = runs.experiment
    is_real, is_job = experiment.virtual is None, experiment.arguments is None
    alone = launcher is not None or (is_real and experiment.command != "sweep")
    each = experiment.most_ranks * experiment.threads if is_real else 1
    shares = share_cores(jobs or (1 if alone else None), each)[: len(runs.plan)]
    if len(shares) > 1 and launcher is None and experiment.command == "sweep":
        console.note(f"{len(shares)} runs at the same time, each on {len(shares[0])} of {os.cpu_count()} cores")
    simulation = None if is_real else Simulation.of(experiment, sys.argv)
    if simulation is not None:
        console.note(str(simulation))
    if simulation is None or not is_job:  # a process of its own for each run, on virtual ranks too
        with mpi_launcher(experiment, launcher, os.environ, shares) as in_processes:
            return run_all(runs, in_processes, len(shares))
    with VirtualLauncher(simulation, len(shares)) as on_virtual:
        return run_all(runs, on_virtual, len(shares))
