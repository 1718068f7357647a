"""Read the runs of a report: settings, numbers, curves, and where each rank's time went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame, Index

from hpcdist.config import differing
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import Evaluation
from hpcdist.tools.runs import COMPARISON, SWEEP, Run, Steps, find_runs, read_comparison
from hpcdist.tools.statistics import first_reaching

POINTS = 60  # of a curve of losses
PARTS = ("computing", "communicating", "waiting")  # of a rank's time
LOWER_IS_BETTER = ("loss", "error", "rmse", "mse", "mae", "perplexity")  # parts of names of metrics
Progress = Callable[[Sequence[Any], str], Iterable[Any]]  # yields all, under a title; may show how many it has yielded
READING = "reading runs"
REFERENCE = "allreduce"  # the strategy that others are compared with, where nobody says another


class RunCurves(NamedTuple):
    """What the records of a run's steps show.

    Attributes:
        losses: moments of the run with samples, seconds, bytes that all ranks had sent and fetched, and the mean
            training loss since the moment before.
        evaluations: moments with the same and step, epoch, joules, `metric.NAME`.
        times: seconds of each rank, in PARTS.
    """

    losses: DataFrame
    evaluations: DataFrame
    times: DataFrame


@dataclass(frozen=True)
class RunResult:
    """One run.

    Attributes:
        name: of its cell: runs of one name, number of ranks and kind of time differ in their seeds.
        kind: strategy, serial or baseline.
    """

    run: Run
    name: str
    kind: str
    ranks: int
    seed: int
    virtual: bool

    @cached_property
    def curves(self) -> RunCurves:
        """Read the records of all steps, on first use: a run may have millions.

        Raises:
            DataError: a file is damaged.
        """
        return _curves(self.run)


@dataclass(frozen=True)
class JobRuns:
    """All runs of a comparison, of a sweep, or all single runs of one job, and the question they answer.

    Attributes:
        name: of the job; None where no run has it written down.
        title: the job's file, or the folders.
        target: of the metric; None where nobody set one.
        reference: the name that others are compared with.
        settings: in which runs differ: by dotted key, the values of the runs' folders.
        comparison: the folder of the comparison or sweep; None for single runs.
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
        """Return the name of these runs' part of a report that has several parts."""
        name = self.name or "jobs that are not written down"
        return name if self.comparison is None else f"{self.comparison} ({name})"

    @cached_property
    def is_sweep(self) -> bool:
        return self.comparison is not None and (self.comparison / SWEEP).exists()

    @cached_property
    def has_several_ranks(self) -> bool:
        """Tell whether runs, but for those of one process, are on several numbers of ranks, or kinds of them."""
        return len({(one.ranks, one.virtual) for one in self.runs if one.kind != "serial"}) > 1

    def reached(self, one: RunResult) -> Evaluation | None:
        """Return the first evaluation that met the target; None if none did."""
        moments = ((moment, moment.metrics.get(self.metric, math.nan)) for moment in one.run.evaluations)
        return None if self.target is None else first_reaching(moments, self.target, self.higher_is_better)

    def bytes_to_target(self, one: RunResult) -> float | None:
        """Return what all ranks had sent and fetched when the target was met, by their step records."""
        reached, known = self.reached(one), one.curves.evaluations
        return None if reached is None else float(known["bytes"][known["step"] == reached.step].iloc[0])

    def row(self, one: RunResult) -> dict[str, Any]:
        """Return all numbers of a run but those of its curves."""
        summary, start = one.run.summary, one.run.start
        row: dict[str, Any] = {"job": self.name, "comparison": self.comparison and str(self.comparison)}
        row |= {key: getattr(one, key) for key in ("name", "kind", "ranks", "virtual", "seed")}
        row |= {"folder": str(one.run.folder), "failure": one.run.failure, "changes": "; ".join(one.run.changes)}
        if start is not None:
            row |= {key: getattr(start, key) for key in ("started", "ended", "commit", "dirty")}
            row |= {"hosts": " ".join(dict.fromkeys(start.hosts))}
            row |= {f"version.{name}": version for name, version in start.versions.items()}
        if summary is not None:
            row |= {f"metric.{name}": value for name, value in summary.metrics.items()}
            if self.target is not None:
                reached = self.reached(one)
                spent = {"time_to_target_s": "seconds"} | {f"{n}_to_target": n for n in ("samples", "joules")}
                row |= {key: None if reached is None else getattr(reached, name) for key, name in spent.items()}
            same = ("strategy", "stages", "workers", "samples", "wall_s", "bytes_per_step", "messages_per_step")
            row |= {key: getattr(summary, key) for key in (*same, "dropped", "skipped")}
            row |= {f"{key}_s": value for key, value in summary.seconds.model_dump().items()}
            row["bubble"] = sum(summary.bubbles) / summary.stages if summary.bubbles else None
            row |= {"staleness_mean": summary.staleness.mean, "staleness_max": summary.staleness.max}
            row |= {"joules": summary.energy.joules, "joules_per_sample": summary.joules_per_sample}
        return row | {f"setting.{key}": of.get(one.run.folder) for key, of in self.settings.items()}


def read_jobs(
    folders: Sequence[Path],
    target: tuple[str, float] | None = None,
    *,
    only: Collection[Path] | None = None,
    progress: Progress = lambda items, title: items,
) -> list[JobRuns]:
    """Read the runs in folders, at any depth, as `hpcdist runs` groups them: single runs by their jobs, by their names,
    then each comparison and each sweep.

    Each of these answers a question of its own, with its own metric and reference, and names runs by the settings that
    differ in it.

    Args:
        target: a metric and the value of it to be reached, for the jobs with that metric, before the one that a
            comparison names.
        only: the runs' folders; None: all.
        progress: is given the runs, and yields each when it is to be read, such as `console.tracked`.

    Raises:
        ConfigError: there is no such folder, no run, or none has the target's metric.
        DataError: a file is damaged.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"FOLDER must be a folder with runs in it; got {folder}, which is no folder.")
    groups: dict[Path | None, list[Path]] = {folder: [] for folder in folders if (folder / COMPARISON).exists()}
    for run, comparison in find_runs(folders).items():
        if only is None or run in only:
            groups.setdefault(comparison, []).append(run)
    found: list[JobRuns] = []
    for comparison in sorted(groups, key=lambda folder: str(folder or "")):
        plan = None if comparison is None else read_comparison(comparison)
        if comparison is None or plan is None:
            found += _loose(groups[comparison], ", ".join(map(str, folders)), progress)
        elif only is None or groups[comparison]:
            found.append(_comparison(comparison, plan, only, progress))
    if not any(one.run.ended or job.comparison for job in found for one in job.runs):
        if damages := [one.run.damage for job in found for one in job.runs if one.run.damage]:
            raise DataError(damages[0])
        raise ConfigError(
            f"folders must hold a run that has ended; got none in {', '.join(map(str, folders))}. A run writes "
            "summary.json at its end."
        )
    if target is None:
        return found
    name, value = target
    known = [{key for one in job.runs if one.run.summary for key in one.run.summary.metrics} for job in found]
    if not any(name in metrics for metrics in known):
        raise ConfigError(
            f"--target must name a metric of the runs, {', '.join(sorted(set().union(*known)))}; got {name}."
        )
    for number, (job, metrics) in enumerate(zip(found, known, strict=True)):
        if name in metrics:
            better = job.higher_is_better if name == job.metric else is_higher_better(name)
            found[number] = replace(job, metric=name, target=value, higher_is_better=better)
    return found


def is_higher_better(metric: str) -> bool:
    """Guess by a metric's name whether more of it is better."""
    return not any(part in metric.lower() for part in LOWER_IS_BETTER)


def _comparison(folder: Path, plan: Mapping[str, Any], only: Collection[Path] | None, progress: Progress) -> JobRuns:
    try:
        is_virtual = bool(plan.get("virtual"))
        wanted = [run for run in plan["runs"] if only is None or folder / run["folder"] in only]
        runs = [_run(folder / run["folder"], run, is_virtual) for run in progress(wanted, READING)]
        metric = plan["metric"] or _first_metric(runs)  # a script says none before it has run
        known = is_higher_better(metric)
        return JobRuns(
            name=Path(plan["job"]).stem,
            title=plan["job"],
            metric=metric,
            higher_is_better=plan.get("higher_is_better", known) if plan["metric"] else known,
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
            f"{folder / COMPARISON} must be what `hpcdist compare` writes; got {type(error).__name__}: {error}. Make "
            "it again."
        ) from None


def _loose(folders: Sequence[Path], title: str, progress: Progress) -> list[JobRuns]:
    found = [_run(folder) for folder in progress(folders, READING)]
    return [_of_job(job, title, runs) for job, runs in _by_job(found).items()]


def _by_job(runs: Sequence[RunResult]) -> dict[str | None, list[RunResult]]:
    """Group runs by their job; its name is that of its file, or its path where files of several jobs have one name.

    Files of one path, or of the same content, are one job: it may be edited, or named from another folder.
    """
    first: dict[str, str] = {}  # by path, and by checksum: the first path of the job
    for one in runs:
        if one.run.record is not None:
            path, checksum = one.run.record.job.path, one.run.record.job.sha256
            first[path] = first[checksum] = first.get(path) or first.get(checksum) or path
    stems = Counter(Path(path).stem for path in set(first.values()))
    groups: dict[str | None, list[RunResult]] = {}
    for one in runs:
        known = None if one.run.record is None else first[one.run.record.job.path]
        name = known if known is None or stems[Path(known).stem] > 1 else Path(known).stem
        groups.setdefault(name, []).append(one)
    return dict(sorted(groups.items(), key=lambda group: (group[0] is None, group[0] or "")))


def _of_job(job: str | None, title: str, found: Sequence[RunResult]) -> JobRuns:
    """Name a job's runs: one cell are those that have the same settings, but for the seed."""
    settings = _settings(found)
    runs = [replace(one, name=_name(one, settings)) for one in found]
    metric = _first_metric(runs)
    beside = Counter(one.ranks for one in runs)  # a reference on as many ranks as most others
    ordered = sorted(runs, key=lambda one: (not one.run.ended, one.run.strategy != REFERENCE, -beside[one.ranks]))
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
    metrics = [name for one in runs if one.run.summary for name in one.run.summary.metrics]
    return next((name for name in metrics if name != "loss"), "loss")


def _settings(runs: Sequence[RunResult]) -> dict[str, dict[Path, str]]:
    found = differing({one.run.folder: one.run.settings for one in runs if one.run.start})
    return {key: values for key, values in found.items() if key.rpartition(".")[2] != "seed"}


def _name(one: RunResult, settings: Mapping[str, Mapping[Path, str]]) -> str:
    """Name a run by its strategy and the settings in which it differs from others of its job."""
    values = []
    for key, of in settings.items():
        if of.get(one.run.folder, "null") != "null":  # `splits`, or `compression` of `strategy.compression.name`
            parts = key.split(".")
            values.append(f"{parts[-2] if parts[-1] == 'name' and len(parts) > 1 else parts[-1]} {of[one.run.folder]}")
    return one.name + (f" ({', '.join(values)})" if values else "")


# --- one run ----------------------------------------------------------------------------------------------------------
def _run(folder: Path, planned: Mapping[str, Any] | None = None, is_virtual: bool = False) -> RunResult:
    run = Run(folder, follow=True)  # a damaged one is shown with the reason, and hides no other
    if planned is None:
        known = run.summary or run.start
        seed = run.settings.get("seed") if run.summary is None else run.summary.seed
        ranks = known.ranks if known else 0
        planned = {"name": run.strategy or "unknown", "kind": "strategy", "ranks": ranks, "seed": seed}
    virtual = is_virtual or bool(run.start and run.start.virtual)
    one = RunResult(run, **{key: planned[key] for key in ("name", "kind", "ranks", "seed")}, virtual=virtual)
    # A run that went on with other settings is not of the others' kind.
    return replace(one, name=f"{one.name} ({'; '.join(run.changes)})") if run.changes else one


def _curves(run: Run) -> RunCurves:
    steps = Steps(run.folder)
    steps.read()
    records = {name: column.to_numpy() for name, column in steps.frame.items()}  # numpy's sums: pandas' are far slower
    ranks, number = np.unique(records["rank"], return_inverse=True)
    works = np.isin(records["rank"], records["rank"][records["samples"] > 0])
    last = records["step"][works].max(initial=0)
    sent = records["bytes_sent"] + records["bytes_fetched"]
    sent_by_rank = [np.concatenate([[0], sent[number == i].cumsum()]) for i in range(len(ranks))]

    def bytes_at(step: np.ndarray) -> np.ndarray:
        """Return the bytes that all ranks had sent and fetched by a step of the workers; NaN where none is recorded.

        A server's steps are of another number: it is taken to be as far as the workers.
        """
        part = np.minimum(1.0, step / last) if last else np.zeros(len(step))
        found = [of_rank[np.round(part * (len(of_rank) - 1)).astype(int)] for of_rank in sent_by_rank]
        return np.sum(found, axis=0, dtype=float) if last else np.full(len(step), math.nan)

    times = {part: np.bincount(number, records[f"{part}_s"], len(ranks)) for part in PARTS}
    return RunCurves(
        losses=_losses(run, records, int(records["samples"][works].sum()), last, bytes_at),
        evaluations=run.metrics.assign(bytes=bytes_at(run.metrics["step"].to_numpy(float))),
        times=DataFrame(times, index=Index(ranks, name="rank")),
    )


def _losses(
    run: Run, records: Mapping[Any, np.ndarray], total: int, last: int, bytes_at: Callable[[np.ndarray], np.ndarray]
) -> DataFrame:
    """Average the training loss over some steps at a time.

    Args:
        total: samples of all workers.
        last: their last step.
    """
    known = [(0, 0.0), *((one.samples, one.seconds) for one in run.evaluations)]
    if run.summary is not None and total > known[-1][0]:
        known.append((total, run.summary.wall_s))
    step, samples, loss = (
        records[name][(records["samples"] > 0) & (records["losses"] > 0)] for name in ("step", "samples", "loss")
    )
    count = max(1, min(POINTS, last))
    number = np.minimum((step - 1) * count // max(1, last), count - 1).astype(int)
    there, sums = np.unique(number), np.bincount(number, samples, count)
    trained = sums[there].cumsum().astype(int)
    points = DataFrame(
        {
            "samples": trained,
            "seconds": np.interp(trained, *np.transpose(known)),
            "bytes": bytes_at((there + 1) * last // count),
            "loss": np.bincount(number, loss * samples, count)[there] / sums[there],
        }
    )
    return points[trained <= known[-1][0]]
