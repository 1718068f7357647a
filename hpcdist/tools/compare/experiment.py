"""Comparisons and sweeps from Python, in the words of the commands: `hpcdist.compare`, `simulate`, `sweep`.

The commands make their declarations here, too, so that script and command go on with each other's folders.
"""

from __future__ import annotations

import abc
import hashlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from pandas import DataFrame

from hpcdist.config.merge import as_flags, load
from hpcdist.errors import ConfigError
from hpcdist.tools import console, report
from hpcdist.tools.compare import folder, run_all
from hpcdist.tools.compare.comparison import Comparison
from hpcdist.tools.compare.launchers import mpi_launchers, share_cores
from hpcdist.tools.compare.plan import Declaration, SweepDeclaration, read_budget, split_strategies
from hpcdist.tools.compare.sweep import Sweep
from hpcdist.tools.report.analysis import Analysis, analyse
from hpcdist.tools.report.page import sections_of
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.report.table import tables, write_csv
from hpcdist.tools.report.verdict import judge
from hpcdist.tools.simulate.cluster import ClusterConfig, read_cluster
from hpcdist.tools.simulate.launcher import Simulation, VirtualLauncher
from hpcdist.tools.simulate.step_time import on_cluster
from hpcdist.train import load_job

D = TypeVar("D", Declaration, SweepDeclaration)


def compare(
    job: str | Path,
    strategies: Sequence[str] = ("allreduce",),
    ranks: Sequence[int] = (1, 2),
    seeds: int = 5,
    *,
    output: str | Path | None = None,
    launcher: str | None = None,
    **options: Any,
) -> ComparedRuns:
    """Compare strategies on a job, as `hpcdist compare` does; only runs that are missing in the folder are made.

    Args:
        job: path of a Python file that defines `job`.
        strategies: each `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.
        ranks: numbers of ranks to run on.
        seeds: runs of each strategy on each number of ranks.
        output: folder for all files; None: runs/compare-JOB, or -2 and so on if that holds other settings.
        launcher: command that starts ranks, such as `srun --mpi=pmix -n`; None: mpirun.
        options: of the command, under the names of `declare`: `budget`, `target`, `settings`, `rates`, `tune`...

    Raises:
        ConfigError: a setting is wrong, or the folder holds another comparison.
    """
    return make(*place("compare", declare(job, strategies, ranks, seeds, **options), output), launcher)


def simulate(
    job: str | Path,
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
    declared = declare(job, strategies, ranks, seeds, **options)
    described = read_cluster(None if cluster is None else Path(cluster), network, compute)
    return make_virtual(*place("simulate", declared, output, described), workers)


def sweep(
    job: str | Path,
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
        over: settings with their values: a list, or a text as `--over` takes it, such as `0.001..0.1:log`.
        runs: number of combinations to try; the sampler `grid` tries all.
        jobs: runs at the same time; None: as many as have cores of their own.
        output: folder for all files; None: runs/sweep-JOB, or -2 and so on if that holds other settings.
        launcher: see `compare`.
        options: of the command, under the names of `declare_sweep`: `strategy`, `ranks`, `sampler`, `budget`...

    Raises:
        ConfigError: a setting is wrong, Optuna is not installed, or the folder holds another sweep.
    """
    spaces = [f"{key}={text if isinstance(text, str) else ','.join(map(str, text))}" for key, text in over.items()]
    found = Sweep(*place("sweep", declare_sweep(job, spaces, runs, **options), output))
    return SweptRuns(found, make_sweep(found, launcher, jobs))


def declare(
    job: str | Path,
    strategies: Sequence[str],
    ranks: Sequence[int],
    seeds: int,
    *,
    rates: Mapping[str, float] | None = None,
    baselines: Sequence[str] = (),
    tune: int = 0,
    controls: bool = True,
    evaluations: int = 20,
    threads: int = 1,
    **shared_options: Any,
) -> Declaration:
    """Declare a comparison.

    Args:
        rates: learning rates by strategy.
        baselines: other libraries to compare with: ddp, horovod.
        tune: runs in which each strategy first searches its learning rate.
        controls: also train on one process with the batch of all ranks.
        evaluations: of each run with a budget of samples or steps.
        threads: of each process.
        shared_options: `budget`, `target`, `config`, `settings`; see `shared`.
    """
    return Declaration(
        **shared(job, **shared_options), strategies=tuple(split_strategies(",".join(strategies))),
        ranks=tuple(dict.fromkeys(ranks)), rates=dict(rates or {}), seeds=seeds, baselines=tuple(baselines), tune=tune,
        controls=controls, evaluations=evaluations, threads=threads,
    )  # fmt: skip


def declare_sweep(
    job: str | Path,
    over: Sequence[str],
    runs: int,
    *,
    strategy: str = "allreduce",
    ranks: int = 1,
    seeds: int = 1,
    sampler: str = "tpe",
    pruner: str = "none",
    evaluations: int = 20,
    threads: int = 1,
    **shared_options: Any,
) -> SweepDeclaration:
    """Declare a sweep.

    Args:
        over: settings with their values, each KEY=VALUES.
        runs: number of combinations to try; the sampler `grid` tries all.
        strategy: of all runs, `NAME` or `NAME:KEY=VALUE`.
        ranks: of each run.
        seeds: runs of each combination.
        sampler: tpe, random or grid.
        pruner: asha, median or none.
        evaluations: of each run with a budget of samples or steps.
        threads: of each process.
        shared_options: `budget`, `target`, `config`, `settings`; see `shared`.
    """
    return SweepDeclaration(
        **shared(job, **shared_options), over=tuple(over), trials=runs, strategy=strategy, ranks=ranks, seeds=seeds,
        sampler=sampler, pruner=pruner, evaluations=evaluations, threads=threads,
    )  # fmt: skip


def shared(
    job: str | Path,
    *,
    budget: Mapping[str, float] | None = None,
    target: tuple[str, float] | None = None,
    config: str | Path | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what the declarations of comparisons and sweeps have.

    Args:
        budget: when each run ends: `samples`, `steps` or `seconds`; None: after the job's epochs.
        target: a metric and its value to reach; without one the metric is the job's first.
        config: TOML file of settings.
        settings: of all runs, each KEY=VALUE; they win over the file.

    Raises:
        ConfigError: the job is no path, or a setting is wrong.
    """
    if not isinstance(job, (str, Path)):
        raise ConfigError(
            f"job must be the path of a Python file that defines `job`; got a {type(job).__name__}. The ranks are "
            "other processes, which read the file: write the job to one."
        )
    file = Path(job)
    metric, value = (next(iter(load_job(file).metrics), "loss"), None) if target is None else target
    return {
        "job": str(job),
        "job_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
        "metric": metric,
        "target": value,
        "budget": read_budget([f"{unit}={limit}" for unit, limit in (budget or {}).items()]),
        "settings": tuple(as_flags(load({}, None if config is None else Path(config), settings))),
    }


def place(command: str, declared: D, output: str | Path | None, cluster: ClusterConfig | None = None) -> tuple[D, Path]:
    """Choose the folder of a command that names none: the one that holds this already, or a new one.

    Args:
        cluster: of virtual ranks, which the declaration is given; None for real ones.
    """
    if output is None:
        where = declared if cluster is None else replace(declared, virtual=cluster.model_dump())
        output = folder.default(Path("runs") / f"{command}-{Path(declared.job).stem}", where)
    return declared if cluster is None else on_cluster(declared, cluster, Path(output)), Path(output)


def make(declared: Declaration, output: Path, launcher: str | None) -> ComparedRuns:
    """Make the runs of a comparison that are missing, on real ranks."""
    comparison = Comparison(declared, output)
    most = max(declared.ranks)
    launchers = mpi_launchers(declared.job, most, declared.threads, launcher, os.environ, declared.baselines)
    return ComparedRuns(output, run_all.make(comparison, launchers))


def make_virtual(declared: Declaration, output: Path, workers: int | None) -> ComparedRuns:
    """Make the runs of a comparison that are missing, on virtual ranks."""
    comparison = Comparison(declared, output)
    simulation = Simulation.of(declared, sys.argv)
    console.note(str(simulation))
    processes = min(workers or len(os.sched_getaffinity(0)), len(comparison.cells) * declared.seeds)
    with VirtualLauncher(simulation, processes) as starter:
        return ComparedRuns(output, run_all.make(comparison, {"strategy": starter, "serial": starter}, processes))


def make_sweep(found: Sweep, launcher: str | None, jobs: int | None) -> bool:
    """Make the runs of a sweep that are missing, on real or virtual ranks; tell whether one failed.

    Args:
        jobs: runs at the same time; None: as many as have cores of their own, or one with a launcher, which may start
            ranks elsewhere.
    """
    declared = found.declared
    each = declared.ranks * declared.threads if declared.virtual is None else 1
    shares = share_cores(jobs or (None if launcher is None else 1), each)[: len(found.runs)]
    if len(shares) > 1 and launcher is None:
        console.note(f"{len(shares)} runs at the same time, each on {len(shares[0])} of {os.cpu_count()} cores")
    if declared.virtual is not None:
        simulation = Simulation.of(declared, sys.argv)
        console.note(str(simulation))
        with VirtualLauncher(simulation, len(shares)) as starter:
            return run_all.make(found, {"strategy": starter}, len(shares))
    launchers = mpi_launchers(declared.job, declared.ranks, declared.threads, launcher, os.environ, shares=shares)
    with launchers["strategy"] as made:
        return run_all.make(found, {"strategy": made}, len(shares))


class MadeRuns(abc.ABC):
    """The runs of a comparison or a sweep. A notebook shows their table.

    Attributes:
        folder: of all files.
        failed: a run has failed; its folder says why, and the same call makes it again.
    """

    def __init__(self, folder: Path, failed: bool):
        self.folder, self.failed = folder, failed

    @property
    @abc.abstractmethod
    def table(self) -> DataFrame:
        """Return what the runs have measured."""

    def report(self, output: str | Path | None = None) -> Path:
        """Write the report to a folder, None: `report` in that of the runs; return its page."""
        return report.write(self.folder, None if output is None else Path(output))

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False, na_rep="")


class SweptRuns(MadeRuns):
    """The trials of a sweep; see `MadeRuns`."""

    def __init__(self, found: Sweep, failed: bool):
        super().__init__(found.output, failed)
        self._sweep = found

    @property
    def best(self) -> dict[str, str]:
        """Return the settings of the best trial that has ended, by KEY; empty without any."""
        keys = [axis.partition("=")[0] for axis in self._sweep.declared.over]
        rows = [row for row in self._sweep.table() if row["state"] == "complete"]
        return {key: rows[0][key] for key in keys} if rows else {}

    @property
    def table(self) -> DataFrame:
        """Return a row for each trial that has begun, the best first."""
        return DataFrame(self._sweep.table())


class ComparedRuns(MadeRuns):
    """The runs of a comparison; see `MadeRuns`."""

    @cached_property
    def table(self) -> DataFrame:
        """Return a row for each kind of run, with the columns of `hpcdist report --csv`."""
        text = io.StringIO()
        write_csv(tables([self._analysis]), text)
        return pd.read_csv(io.StringIO(text.getvalue()))

    @cached_property
    def runs(self) -> DataFrame:
        """Return a row for each run, as `hpcdist.read_runs` does."""
        return report.read_runs(self.folder)

    @cached_property
    def verdict(self) -> str:
        """Return the answer of the report, in a sentence or two."""
        return judge(self._analysis).headline

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the report's figures, matplotlib's, by their names."""
        found = [drawn for section in sections_of(self._analysis) for of in section.figures.values() for drawn in of]
        return {drawn.name: drawn.figure for drawn in found}

    @cached_property
    def _analysis(self) -> Analysis:
        (job,) = read_jobs([self.folder])
        return analyse(job)
