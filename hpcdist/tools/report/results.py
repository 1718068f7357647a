"""Read the runs of a report: settings, results, curves, and each rank's time by activity."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame, Index

from hpcdist.config.merge import differing
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import Evaluation
from hpcdist.tools.report.wording import is_share
from hpcdist.tools.runs import COMPARISON, SWEEP, Run, Steps, find_runs, read_comparison

POINTS = 60  # of a loss curve
PARTS = ("computing", "communicating", "waiting")  # of a rank's time
LOWER_IS_BETTER = ("loss", "error", "rmse", "mse", "mae", "perplexity")  # parts of metrics' names
Progress = Callable[[Sequence[Any], str], Iterable[Any]]  # wraps an iteration with a progress display under a title
READING = "reading runs"
REFERENCE = "allreduce"  # default strategy that others are compared with
PATH = re.compile(r"/|\.[A-Za-z]\w*$")  # in a value that names a file or a folder
# Names of a script's arguments that only say where it writes.
CHECKPOINTS = re.compile(r"(checkpoint|ckpt)(s|s?[_-]?(dir|directory|folder|path))")
WRITTEN = re.compile(rf"(out|output|save|log|result|run)s?([_-]?(dir|folder|path|file))?|{CHECKPOINTS.pattern}")


class RunCurves(NamedTuple):
    """Curves of a run, from the records of its steps.

    Attributes:
        losses: points with samples, seconds, bytes (sent and fetched by all ranks), mean loss since the last point.
        evaluations: points with samples, seconds, bytes, step, epoch, joules, `metric.NAME`.
        times: seconds of each rank by activity (PARTS).
    """

    losses: DataFrame
    evaluations: DataFrame
    times: DataFrame


@dataclass(frozen=True)
class RunResult:
    """One run and its position in the comparison.

    Attributes:
        name: of its group.
        kind: strategy, serial or baseline.
    """

    run: Run
    name: str
    kind: str
    ranks: int
    seed: int
    virtual: bool

    @property
    def cell(self) -> tuple[str, str, int, bool]:
        """Return what the runs of a group share."""
        return self.name, self.kind, self.ranks, self.virtual

    @cached_property
    def curves(self) -> RunCurves:
        """Return the curves; the first use reads the records of all steps, which may be millions.

        Raises:
            DataError: a file is damaged.
        """
        return _curves(self.run)


@dataclass(frozen=True)
class JobRuns:
    """Runs that a report compares with each other: a comparison, a sweep, or all single runs of one job.

    Attributes:
        name: of the job; None: not recorded.
        title: the job's file, or the folders.
        target: value of the metric to reach; None: no target.
        reference: name of the group that others are compared with.
        settings: settings that differ between runs: values by folder, by dotted key.
        comparison: folder of the comparison or sweep; None: single runs.
    """

    name: str | None
    title: str
    metric: str
    higher_is_better: bool
    reference: str
    runs: Sequence[RunResult]
    target: float | None = None
    budget: Mapping[str, float] = field(default_factory=dict)
    tuning: Mapping[str, Any] | None = None
    settings: Mapping[str, Mapping[Path, str]] = field(default_factory=dict)
    comparison: Path | None = None

    @property
    def section(self) -> str:
        """Return the title of these runs' part of a report that has several parts."""
        name = self.name or "unknown jobs"
        return name if self.comparison is None else f"{self.comparison} ({name})"

    @cached_property
    def is_sweep(self) -> bool:
        return self.comparison is not None and (self.comparison / SWEEP).exists()

    @cached_property
    def has_several_ranks(self) -> bool:
        """Return whether runs, except serial controls, differ in their number of ranks or in being virtual."""
        return len({(result.ranks, result.virtual) for result in self.runs if result.kind != "serial"}) > 1

    @cached_property
    def has_reached(self) -> bool:
        """Return whether a run met the target. If none did, times are compared for as many samples."""
        return any(self.reached(result) for result in self.runs)

    def reached(self, result: RunResult) -> Evaluation | None:
        """Return the run's first evaluation that met the target; None if none did."""
        if self.target is None:
            return None
        sign, moments = 1 if self.higher_is_better else -1, result.run.evaluations
        return next((m for m in moments if sign * m.metrics.get(self.metric, math.nan) >= sign * self.target), None)

    def bytes_to_target(self, result: RunResult) -> float | None:
        """Return the bytes sent and fetched by all ranks until the target was reached."""
        reached, evaluations = self.reached(result), result.curves.evaluations
        return None if reached is None else float(evaluations["bytes"][evaluations["step"] == reached.step].iloc[0])

    def row(self, result: RunResult) -> dict[str, Any]:
        """Return a run's row of `runs.csv`, by column, without values that need the records of all steps."""
        run, summary, start = result.run, result.run.summary, result.run.start
        row: dict[str, Any] = {"job": self.name, "comparison": self.comparison and str(self.comparison)}
        row |= {key: getattr(result, key) for key in ("name", "kind", "ranks", "virtual", "seed")}
        row |= {"folder": str(run.folder), "failure": run.failure, "changes": "; ".join(run.changes)}
        if start is not None:
            row |= {key: getattr(start, key) for key in ("started", "ended", "commit", "dirty")}
            row |= {"hosts": " ".join(dict.fromkeys(start.hosts))}
            row |= {f"version.{name}": version for name, version in start.versions.items()}
        if summary is not None:
            row |= {f"metric.{name}": value for name, value in summary.metrics.items()}
            if self.target is not None:
                reached = self.reached(result)
                spent = {"time_to_target_s": "seconds"} | {f"{n}_to_target": n for n in ("samples", "joules")}
                row |= {key: None if reached is None else getattr(reached, name) for key, name in spent.items()}
            same = ("strategy", "stages", "workers", "samples", "wall_s", "bytes_per_step", "messages_per_step")
            row |= {key: getattr(summary, key) for key in (*same, "dropped", "skipped")}
            row |= {f"{key}_s": value for key, value in summary.seconds.model_dump().items()}
            row["bubble"] = sum(summary.bubbles) / summary.stages if summary.bubbles else None
            row |= {"staleness_mean": summary.staleness.mean, "staleness_max": summary.staleness.max}
            row |= {"joules": summary.energy.joules, "joules_per_sample": summary.joules_per_sample}
        return row | {f"setting.{key}": values.get(run.folder) for key, values in self.settings.items()}


def read_jobs(
    folders: Sequence[Path],
    target: tuple[str, float] | None = None,
    *,
    only: Collection[Path] | None = None,
    progress: Progress = lambda items, title: items,
) -> list[JobRuns]:
    """Read the runs in folders, at any depth: single runs grouped by job, then each comparison and each sweep.

    Args:
        target: a metric and the value to reach, for all jobs with that metric; it overrides a comparison's.
        only: folders of the runs to read; None: all.
        progress: wraps the iteration over runs with a progress display, such as `console.tracked`.

    Raises:
        ConfigError: a folder is missing, has no runs, or no run has the target's metric.
        DataError: a file is damaged.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"FOLDER must be a folder with runs in it; got {folder}, which is not a folder.")
    # Folders of runs by their comparison, None for single runs. A comparison that is given counts even without runs.
    groups: dict[Path | None, list[Path]] = {folder: [] for folder in folders if (folder / COMPARISON).exists()}
    for run, comparison in find_runs(folders).items():
        if only is None or run in only:
            groups.setdefault(comparison, []).append(run)
    jobs: list[JobRuns] = []
    for comparison in sorted(groups, key=lambda folder: str(folder or "")):
        plan = None if comparison is None else read_comparison(comparison)
        if comparison is None or plan is None:
            single = [_run(folder) for folder in progress(groups[comparison], READING)]
            title = ", ".join(map(str, folders))
            jobs += [_job_of_single_runs(job, title, runs) for job, runs in _by_job(single).items()]
        elif only is None or groups[comparison]:
            jobs.append(_comparison(comparison, plan, only, progress))
    if not any(result.run.ended or job.comparison for job in jobs for result in job.runs):
        if damages := [result.run.damage for job in jobs for result in job.runs if result.run.damage]:
            raise DataError(damages[0])
        raise ConfigError(
            f"folders must hold a finished run; got none in {', '.join(map(str, folders))}. A run writes "
            "summary.json at its end."
        )
    if target is None:
        return jobs
    name, value = target
    refuse_percent(name, value, finals(jobs, name))
    # Metrics of each job.
    known = [{key for result in job.runs if result.run.summary for key in result.run.summary.metrics} for job in jobs]
    if not any(name in metrics for metrics in known):
        raise ConfigError(
            f"--target must name a metric of the runs, {', '.join(sorted(set().union(*known)))}; got {name}."
        )
    for number, (job, metrics) in enumerate(zip(jobs, known, strict=True)):
        if name in metrics:
            better = job.higher_is_better if name == job.metric else is_higher_better(name)
            jobs[number] = replace(job, metric=name, target=value, higher_is_better=better)
    return jobs


def finals(jobs: Iterable[JobRuns], metric: str) -> list[float]:
    return [result.run.summary.metrics.get(metric, 0.0) for job in jobs for result in job.runs if result.run.summary]


def percent(metric: str, target: float | None, values: Iterable[float]) -> str:
    """Return how to write a target in percent if the metric's values are shares; else an empty text."""
    if target is None or target <= 1 or not is_share(metric) or any(value > 1 for value in values):
        return ""
    return f"Write {target:g} % as {metric}={target / 100:g}."


def refuse_percent(metric: str, target: float, values: Iterable[float]) -> None:
    """Raise ConfigError for a target in percent if the metric's values are shares."""
    if advice := percent(metric, target, values):
        raise ConfigError(f"--target of {metric} must be a share from 0 to 1; got {target:g}. {advice}")


def is_higher_better(metric: str) -> bool:
    """Guess from a metric's name whether larger is better."""
    return not any(part in metric.lower() for part in LOWER_IS_BETTER)


def _comparison(folder: Path, plan: Mapping[str, Any], only: Collection[Path] | None, progress: Progress) -> JobRuns:
    """Read the runs of a comparison or sweep, with its metric, target and reference."""
    try:
        is_virtual = bool(plan.get("virtual"))
        selected = [run for run in plan["runs"] if only is None or folder / run["folder"] in only]
        if only is not None:
            seeds = {run["seed"] for run in selected}
            controls = [run for run in plan["runs"] if run["kind"] == "serial" and run["seed"] in seeds]
            selected = _without_sharers([*(run for run in selected if run not in controls), *controls])
        runs = [_run(folder / run["folder"], run, is_virtual) for run in progress(selected, READING)]
        metric = plan["metric"] or _first_metric(runs)  # empty for a script
        guessed = is_higher_better(metric)
        return JobRuns(
            name=Path(plan["job"]).stem,
            title=plan["job"],
            metric=metric,
            higher_is_better=plan.get("higher_is_better", guessed) if plan["metric"] else guessed,
            target=plan.get("target"),
            budget=plan.get("budget") or {},
            tuning=plan.get("tuning"),
            reference=plan["reference"],
            runs=runs,
            settings=_settings(runs),
            comparison=folder,
        )
    except KeyError as error:
        raise DataError(
            f"{folder / COMPARISON} must be written by `hpcdist compare`; got {type(error).__name__}: {error}. Run it "
            "again."
        ) from None


def _without_sharers(planned: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out groups of which only runs were chosen that another group shares with them, such as on one rank."""
    uses = Counter(run["folder"] for run in planned)
    # Names of groups with a run of their own.
    own = {
        run["name"] for run in planned if uses[run["folder"]] == 1 or f"strategy={run['name']}" in run.get("set", ())
    }
    owned = {run["folder"] for run in planned if run["name"] in own}
    return [run for run in planned if run["name"] in own or run["folder"] not in owned]


def _by_job(runs: Sequence[RunResult]) -> dict[str | None, list[RunResult]]:
    """Group runs by job, named by the stem of its file, or by the path if stems repeat.

    Files with the same path or the same content are the same job: a job may be edited, or run from another folder.
    """
    first: dict[str, str] = {}  # first path of each job, by path and by checksum
    for result in runs:
        if result.run.record is not None:
            path, checksum = result.run.record.job.path, result.run.record.job.sha256
            first[path] = first[checksum] = first.get(path) or first.get(checksum) or path
    stems = Counter(Path(path).stem for path in set(first.values()))
    groups: dict[str | None, list[RunResult]] = {}
    for result in runs:
        first_path = None if result.run.record is None else first[result.run.record.job.path]
        name = first_path if first_path is None or stems[Path(first_path).stem] > 1 else Path(first_path).stem
        groups.setdefault(name, []).append(result)
    return dict(sorted(groups.items(), key=lambda group: (group[0] is None, group[0] or "")))


def _job_of_single_runs(job: str | None, title: str, results: Sequence[RunResult]) -> JobRuns:
    """Return the single runs of a job; runs that differ in their seeds only get the same name, and so form a group."""
    settings = _settings(results)
    apart = {key: values for key, values in settings.items() if _is_naming(key, values, results)}
    naming = _without_outputs(apart, results)
    runs = [replace(result, name=_name(result, naming)) for result in results]
    metric = _first_metric(runs)
    n_by_ranks = Counter(result.ranks for result in runs)  # the reference is on the most frequent number of ranks
    ordered = sorted(runs, key=lambda r: (not r.run.ended, r.run.strategy != REFERENCE, -n_by_ranks[r.ranks]))
    return JobRuns(
        name=job,
        title=title,
        metric=metric,
        higher_is_better=is_higher_better(metric),
        reference=ordered[0].name,
        runs=runs,
        settings=settings,
    )


def _first_metric(runs: Sequence[RunResult]) -> str:
    metrics = [name for result in runs if result.run.summary for name in result.run.summary.metrics]
    return next((name for name in metrics if name != "loss"), "loss")


def _settings(runs: Sequence[RunResult]) -> dict[str, dict[Path, str]]:
    """Return the settings, other than seeds, in which runs differ: values by folder, by dotted key."""
    different = differing({result.run.folder: result.run.settings for result in runs if result.run.start})
    return {key: values for key, values in different.items() if key.rpartition(".")[2] != "seed"}


def _is_naming(key: str, values: Mapping[Path, str], runs: Sequence[RunResult]) -> bool:
    """Return whether a setting tells groups apart: no path to write to, nor the strategy or seed again."""
    argument = key.removeprefix("arguments.")
    if argument == key:
        return True
    if WRITTEN.fullmatch(argument) and not any(value.isdigit() for value in values.values()):
        return False
    own = zip(*((result.run.strategy, str(result.seed)) for result in runs))
    return not any(
        all(values.get(result.run.folder) in (None, value) for result, value in zip(runs, of_all)) for of_all in own
    )


def _without_outputs(
    naming: Mapping[str, Mapping[Path, str]], runs: Sequence[RunResult]
) -> Mapping[str, Mapping[Path, str]]:
    """Drop a script's arguments whose values are paths, another one for each run, unless the seeds differ, too.

    Runs with equal seeds that differ only in paths may differ in their data, and keep the paths in their names.
    """

    def different(keys: Collection[str], having: str | None = None) -> int:
        """Count different runs, by their seeds and these settings, of those that have the setting `having`."""
        chosen = [run for run in runs if having is None or run.run.folder in naming[having]]
        return len({(run.cell, run.seed, *(naming[key].get(run.run.folder) for key in keys)) for run in chosen})

    paths = {k for k, v in naming.items() if k.startswith("arguments.") and all(map(PATH.search, v.values()))}
    others = naming.keys() - paths
    outputs = {key for key in paths if len(set(naming[key].values())) == different({*others, key}, key)}
    without = {key: values for key, values in naming.items() if key not in outputs}
    return without if different(without) == different(naming) else naming


def _name(result: RunResult, settings: Mapping[str, Mapping[Path, str]]) -> str:
    """Return a run's name: its strategy, and the settings in which it differs from other runs of the job."""
    values = []
    for key, values_by_folder in settings.items():
        if values_by_folder.get(result.run.folder, "null") != "null":
            # Last part of the key: `splits`; `compression` for `strategy.compression.name`.
            parts = key.split(".")
            part = parts[-2] if parts[-1] == "name" and len(parts) > 1 else parts[-1]
            values.append(f"{part} {values_by_folder[result.run.folder]}")
    return result.name + (f" ({', '.join(values)})" if values else "")


# --- one run ----------------------------------------------------------------------------------------------------------
def _run(folder: Path, planned: Mapping[str, Any] | None = None, is_virtual: bool = False) -> RunResult:
    """Read one run; `planned` is its entry in `comparison.json`, None for a single run."""
    run = Run(folder, follow=True)  # reports a damaged run without raising
    if planned is None:
        source = run.summary or run.start
        seed = run.settings.get("seed") if run.summary is None else run.summary.seed
        ranks = source.ranks if source else 0
        planned = {"name": run.strategy or "unknown", "kind": "strategy", "ranks": ranks, "seed": seed}
    virtual = is_virtual or bool(run.start and run.start.virtual)
    result = RunResult(run, **{key: planned[key] for key in ("name", "kind", "ranks", "seed")}, virtual=virtual)
    # A run that was resumed with other settings forms a separate group.
    return replace(result, name=f"{result.name} ({'; '.join(run.changes)})") if run.changes else result


def _curves(run: Run) -> RunCurves:
    """Compute the curves and times of a run from the records of its steps."""
    recorded = Steps(run.folder)
    recorded.read()
    records = {name: column.to_numpy() for name, column in recorded.frame.items()}  # pandas' sums are far slower
    ranks, rank_index = np.unique(records["rank"], return_inverse=True)  # the index: of each row's rank in `ranks`
    of_workers = np.isin(records["rank"], records["rank"][records["samples"] > 0])
    last_step = records["step"][of_workers].max(initial=0)
    sent = records["bytes_sent"] + records["bytes_fetched"]
    by_rank = [rank_index == i for i in range(len(ranks))]
    sent_by_rank = [np.concatenate([[0], sent[own].cumsum()]) for own in by_rank]
    # A server's steps are others: its progress is taken as proportional to the workers'.
    of_servers = [np.linspace(0, last_step, len(of_rank))[1:] - 1e-6 for of_rank in sent_by_rank]
    steps = [records["step"][own] if of_workers[own].any() else even for own, even in zip(by_rank, of_servers)]

    def bytes_at(step: np.ndarray) -> np.ndarray:
        """Return the bytes that all ranks had sent and fetched by a step of the workers; NaN without records."""
        parts = [of_rank[np.searchsorted(own, step, "right")] for own, of_rank in zip(steps, sent_by_rank)]
        return np.sum(parts, axis=0, dtype=float) if last_step else np.full(len(step), math.nan)

    times = {part: np.bincount(rank_index, records[f"{part}_s"], len(ranks)) for part in PARTS}
    return RunCurves(
        losses=_losses(run, records, int(records["samples"][of_workers].sum()), last_step, bytes_at),
        evaluations=run.metrics.assign(bytes=bytes_at(run.metrics["step"].to_numpy(float))),
        times=DataFrame(times, index=Index(ranks, name="rank")),
    )


def _losses(
    run: Run, records: Mapping[Any, np.ndarray], total: int, last: int, bytes_at: Callable[[np.ndarray], np.ndarray]
) -> DataFrame:
    """Return `RunCurves.losses`: the training loss averaged over up to POINTS blocks of steps.

    Args:
        total: samples of all workers.
        last: last step of the workers.
        bytes_at: returns the bytes of all ranks by given steps, for points' `bytes`.
    """
    # Moments whose samples and seconds are known; seconds between them are interpolated.
    times = [(0, 0.0), *((result.samples, result.seconds) for result in run.evaluations)]
    if run.summary is not None and total > times[-1][0]:
        times.append((total, run.summary.wall_s))
    trains = records["samples"] > 0
    step, samples, loss, finite = (records[name][trains] for name in ("step", "samples", "loss", "losses"))
    n_blocks = max(1, min(POINTS, last))
    # Block of each step; blocks without a finite loss have no point, but their samples count.
    block = np.minimum((step - 1) * n_blocks // max(1, last), n_blocks - 1).astype(int)
    filled, n_finite = np.unique(block[finite > 0]), np.bincount(block, finite * samples, n_blocks)
    trained = np.bincount(block, samples, n_blocks).cumsum()[filled].astype(int)
    sums = np.bincount(block, np.where(finite > 0, loss * samples, 0.0), n_blocks)
    points = DataFrame(
        {
            "samples": trained,
            "seconds": np.interp(trained, *np.transpose(times)),
            "bytes": bytes_at((filled + 1) * last // n_blocks),
            "loss": sums[filled] / n_finite[filled],
        }
    )
    return points[trained <= times[-1][0]]  # times of later ones are unknown
