"""Comparisons and sweeps from Python and from the command line: `hpcdist.compare`, `simulate`, `sweep`.

Both use the same code, so a script can resume what the command started, and the reverse.
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
from hpcdist.tools.compare.run_all import ExperimentRuns, run_all
from hpcdist.tools.compare.sweep import SweptRuns
from hpcdist.tools.options import named_as_arguments
from hpcdist.tools.simulate.cluster import read_cluster
from hpcdist.tools.simulate.launcher import Simulation, VirtualLauncher
from hpcdist.tools.simulate.step_time import on_cluster
from hpcdist.tools.slurm import arrays

NOUNS = {"compare": "comparison", "simulate": "simulation", "sweep": "sweep"}


@named_as_arguments()
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
    """Compare strategies on a job, as `hpcdist compare` does. Runs that already exist in the folder are not repeated.

    Args:
        job: path of a Python file that defines `job`, or of a script with its own training loop; or a function with
            such a loop, which the ranks import from its file. A function's parameters `seed`, `strategy` and `run` (a
            folder) are filled in for each run.
        strategies: each `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.
        ranks: numbers of ranks to run on.
        seeds: runs of each strategy on each number of ranks; None: 5, or 1 if a script takes no seed.
        output: folder for all files; None: runs/compare-JOB, with -2, -3... if that holds other settings.
        launcher: command that starts ranks, such as `srun --mpi=pmix -n`; None: mpirun.
        options: the other fields of `Comparison` and `Execution`, and `config` (a TOML file). A budget is a dict,
            `{"samples": 20000}`, and so are the rates; a target is `("accuracy", 0.97)`.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another comparison.
    """
    return run(
        "compare", job, strategies=strategies, ranks=ranks, seeds=seeds, output=output, launcher=launcher, **options
    )


@named_as_arguments()
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
        network: latency and bandwidth of each link, as `50us,1Gbit/s`.
        compute: time of a step, as `jitter:20ms,0.2`; None: measured here.
        cluster: TOML file with network, intra_network, ranks_per_node, compute.
        workers: concurrent runs; None: one per core.
    """
    where: dict[str, Any] = {
        "network": network,
        "compute": compute,
        "cluster": cluster,
        "output": output,
        "workers": workers,
    }
    return run("simulate", job, strategies=strategies, ranks=ranks, seeds=seeds, **where, **options)


@named_as_arguments()
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
    """Search for good settings of a job, as `hpcdist sweep` does. Existing runs in the folder are not repeated.

    Args:
        job: see `compare`; the settings of a function are its parameters.
        over: values by setting: a list, or a text as for `--over`, such as `0.001..0.1:log`.
        runs: number of combinations to try; the sampler `grid` tries all.
        jobs: concurrent runs; None: as many as fit on the cores.
        output: folder for all files; None: runs/sweep-JOB, with -2, -3... if that holds other settings.
        launcher: see `compare`.
        options: the other fields of `Sweep` and `Execution`; with `virtual=True` also the arguments of `simulate`.

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
    **options: Any,
) -> Any:
    """Run what is missing of an experiment, here or in Slurm; if its Slurm jobs are still queued, show them instead.

    Args:
        command: compare, simulate or sweep.
        job: None: resume the experiment in the folder `output`.
        workers: the same as `jobs`.
        options: fields of `Execution` and of the command's experiment, as `Experiment.of` takes them.

    Returns:
        The `ExperimentRuns` of the command.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another experiment, or none to resume.
    """
    if world.planned() is not None:
        raise ConfigError(
            f"hpcdist.{command} must not be called by the file that it trains; got a call from there. Put it under "
            '`if __name__ == "__main__":`, or into another file.'
        )
    execution = Execution(**{f.name: options.pop(f.name) for f in fields(Execution) if f.name in options})
    kind: type[Any]  # subclass of Experiment
    kind, runs_class = (Sweep, SweptRuns) if command == "sweep" else (Comparison, ComparedRuns)
    cluster_config = None
    if virtual or command == "simulate":
        cluster_config = read_cluster(None if cluster is None else Path(cluster), network, compute)
    elif (cluster, network, compute) != (None, None, None):
        raise ConfigError("--virtual must be given with --network, --compute and --cluster; got none. Add it.")
    if job is None:
        output, experiment = _experiment_in_folder(command, kind, execution.output, options)
    else:
        if command == "sweep" and not options["over"]:
            raise ConfigError("--over must be given to start a sweep; got none. Such as --over batch_size=16,32.")
        experiment = kind.of(job, virtual=None if cluster_config is None else cluster_config.model_dump(), **options)
        name = f"{command}-{Path(experiment.job).stem}"
        output = Path(execution.output or folder.default(Path("runs") / name, experiment))
        experiment = experiment if cluster_config is None else on_cluster(experiment, cluster_config, output)
    if experiment.virtual is not None and (execution.slurm is not None or execution.launcher is not None):
        raise ConfigError("--slurm and --launcher must be omitted with virtual ranks; got one of them. Remove it.")
    runs = runs_class(experiment, output)
    if execution.slurm is not None:
        runs.failed = arrays.submit_missing(runs, execution.slurm, execution.slurm_set or (), execution.jobs)
    elif waiting := arrays.pending(output):
        runs.failed = arrays.show(runs, waiting)
    else:
        runs.failed = _run_here(runs, execution.launcher, execution.jobs or workers)
    return runs


def _experiment_in_folder(
    command: str, kind: type[Any], output: str | Path | None, options: Mapping[str, Any]
) -> tuple[Path, Any]:
    """Return the folder that a command without a job resumes, and the experiment read from it."""
    if output is None or options.get("over" if command == "sweep" else "strategies"):
        raise ConfigError(f"JOB must be given to start a {NOUNS[command]}; got none. Such as jobs/digits.py.")
    output = Path(output)
    experiment = folder.read_experiment(output, kind)
    if experiment.command != command:
        expected, held = ("real", "virtual") if command == "compare" else ("virtual", "real")
        raise ConfigError(
            f"--output must hold a comparison on {expected} ranks; got {output}, on {held} ones. Resume it with "
            f"`hpcdist {experiment.command} --output {output}`."
        )
    return output, experiment


def _run_here(runs: ExperimentRuns, launcher: str | None, jobs: int | None) -> bool:
    """Run what is missing on this machine, on real or virtual ranks; return whether a run failed.

    Args:
        jobs: concurrent runs. None: one for comparisons on real ranks and with a launcher, which may start ranks on
            other machines; otherwise as many as fit on the cores.
    """
    experiment = runs.experiment
    on_real_ranks, is_job = experiment.virtual is None, experiment.arguments is None
    one_at_a_time = launcher is not None or (on_real_ranks and experiment.command != "sweep")
    cores_per_run = experiment.max_ranks * experiment.threads if on_real_ranks else 1
    # The cores of each concurrent run.
    shares = share_cores(jobs or (1 if one_at_a_time else None), cores_per_run)[: len(runs.plan)]
    if len(shares) > 1 and launcher is None and experiment.command == "sweep":
        console.note(f"{len(shares)} concurrent runs, each on {len(shares[0])} of {os.cpu_count()} cores")
    simulation = None if on_real_ranks else Simulation.of(experiment, sys.argv)
    if simulation is not None:
        console.note(str(simulation))
    if simulation is None or not is_job:  # a separate process per run, on virtual ranks too
        with mpi_launcher(experiment, launcher, os.environ, shares) as process_launcher:
            return run_all(runs, process_launcher, len(shares))
    with VirtualLauncher(simulation, len(shares)) as virtual_launcher:
        return run_all(runs, virtual_launcher, len(shares))
