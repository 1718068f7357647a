"""Read the runs of a report from their folders: settings, numbers, curves, and where each rank's time went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from hpcdist.config import differing
from hpcdist.errors import ConfigError, DataError
from hpcdist.tools.runs import COMPARISON, Run, Steps, find_runs, read_comparison
from hpcdist.tools.statistics import first_reaching

POINTS = 60  # of a curve of losses
PARTS = ("computing", "communicating", "waiting")  # of a rank's time
LOWER_IS_BETTER = ("loss", "error", "rmse", "mse", "mae", "perplexity")  # parts of names of metrics
REFERENCE = "allreduce"  # the strategy that others are compared with, where nobody says another


@dataclass(frozen=True)
class RunEvidence:
    """One run.

    Attributes:
        name: of its cell: runs of one name, number of ranks and kind of time differ in their seeds.
        kind: strategy, serial or baseline.
        losses: moments of the run with samples, seconds, bytes that all ranks had sent and fetched, and the mean
            training loss since the moment before.
        evaluations: moments with the same and step, epoch, joules, `metric.NAME`.
        times: seconds of each rank, in PARTS.
    """

    run: Run
    name: str
    kind: str
    ranks: int
    seed: int
    virtual: bool
    losses: DataFrame
    evaluations: DataFrame
    times: DataFrame


@dataclass(frozen=True)
class Evidence:
    """All runs of a report, and the question they answer.

    Attributes:
        title: the job's file, or the folder.
        target: of the metric; None where nobody set one.
        reference: the name that others are compared with.
        settings: in which runs differ: by dotted key, the values of the runs' folders.
    """

    title: str
    metric: str
    higher_is_better: bool
    reference: str
    runs: Sequence[RunEvidence]
    target: float | None = None
    budget: Mapping[str, float] = field(default_factory=dict)
    tuning: Mapping[str, Any] | None = None
    settings: Mapping[str, Mapping[Path, str]] = field(default_factory=dict)

    def reached(self, one: RunEvidence) -> dict[str, float] | None:
        """Return the moment of the first evaluation that met the target; None if none did."""
        moments = one.evaluations.to_dict("records")
        values = ((moment, moment.get(f"metric.{self.metric}", math.nan)) for moment in moments)
        return None if self.target is None else first_reaching(values, self.target, self.higher_is_better)

    def row(self, one: RunEvidence) -> dict[str, Any]:
        """Return all numbers of a run, for CSV, JSON and pandas."""
        summary, start = one.run.summary, one.run.start
        row: dict[str, Any] = {key: getattr(one, key) for key in ("name", "kind", "ranks", "virtual", "seed")}
        row |= {"folder": str(one.run.folder), "failure": one.run.failure}
        if start is not None:
            row |= {"started": start.started, "ended": start.ended, "commit": start.commit, "dirty": start.dirty}
            row |= {"hosts": " ".join(dict.fromkeys(start.hosts))}
            row |= {f"version.{name}": version for name, version in start.versions.items()}
        if summary is not None:
            row |= {f"metric.{name}": value for name, value in summary.metrics.items()}
            if self.target is not None:
                reached = self.reached(one)
                spent = {"time_to_target_s": "seconds"} | {f"{n}_to_target": n for n in ("samples", "bytes", "joules")}
                row |= {key: None if reached is None else reached[name] for key, name in spent.items()}
            same = ("strategy", "workers", "samples", "wall_s", "bytes_per_step", "messages_per_step")
            row |= {key: getattr(summary, key) for key in (*same, "dropped", "skipped")}
            row |= {f"{key}_s": value for key, value in summary.seconds.model_dump().items()}
            row |= {"staleness_mean": summary.staleness.mean, "staleness_max": summary.staleness.max}
            row |= {"joules": summary.energy.joules, "joules_per_sample": summary.joules_per_sample}
        return row | {f"setting.{key}": of.get(one.run.folder) for key, of in self.settings.items()}


def read(folders: Sequence[Path], target: tuple[str, float] | None = None) -> Evidence:
    """Read a comparison's folder, or any folders with runs at any depth.

    Args:
        target: a metric and the value of it to be reached, before those that a comparison names.

    Raises:
        ConfigError: there is no run, or none has the target's metric.
        DataError: a file is damaged.
    """
    plan = read_comparison(folders[0]) if len(folders) == 1 else None
    evidence = _loose(folders) if plan is None else _comparison(folders[0], plan)
    if target is None:
        return evidence
    name, value = target
    known = sorted({key for one in evidence.runs if one.run.summary for key in one.run.summary.metrics})
    if name not in known:
        raise ConfigError(f"--target must name a metric of the runs, {', '.join(known)}; got {name}.")
    better = evidence.higher_is_better if name == evidence.metric else is_higher_better(name)
    return replace(evidence, metric=name, target=value, higher_is_better=better)


def is_higher_better(metric: str) -> bool:
    """Guess by a metric's name whether more of it is better."""
    return not any(part in metric.lower() for part in LOWER_IS_BETTER)


def _comparison(folder: Path, plan: Mapping[str, Any]) -> Evidence:
    try:
        metric, is_virtual = plan["metric"], bool(plan.get("virtual"))
        runs = [_run(folder / run["folder"], run, is_virtual) for run in plan["runs"]]
        return Evidence(
            title=plan["job"],
            metric=metric,
            higher_is_better=plan.get("higher_is_better", is_higher_better(metric)),
            target=plan.get("target"),
            budget=plan.get("budget") or {},
            tuning=plan.get("tuning"),
            reference=plan["reference"],
            runs=runs,
            settings=_settings(runs),
        )
    except (KeyError, AttributeError) as error:
        raise DataError(
            f"{folder / COMPARISON} must be what `hpcdist compare` writes; got {type(error).__name__}: {error}. Make "
            "it again."
        ) from None


def _loose(folders: Sequence[Path]) -> Evidence:
    """Read runs that nobody planned: one cell are those that have the same settings, but for the seed."""
    found = [_run(folder) for folder in find_runs(folders)]
    if not any(one.run.ended for one in found):
        named = ", ".join(map(str, folders))
        raise ConfigError(f"folders must hold a run that has ended; got none in {named}. Give a folder of runs.")
    settings = _settings(found)
    several = len({one.run.start.job.path for one in found if one.run.start}) > 1
    runs = [replace(one, name=_name(one, settings, several)) for one in found]
    metrics = [name for one in runs if one.run.summary for name in one.run.summary.metrics]
    metric = next((name for name in metrics if name != "loss"), "loss")
    names = list(dict.fromkeys(one.name for one in runs if one.run.ended))
    return Evidence(
        title=", ".join(map(str, folders)),
        metric=metric,
        higher_is_better=is_higher_better(metric),
        reference=next((name for name in names if name.split()[0] == REFERENCE), names[0]),
        runs=runs,
        settings=settings,
    )


def _settings(runs: Sequence[RunEvidence]) -> dict[str, dict[Path, str]]:
    found = differing({one.run.folder: one.run.settings for one in runs if one.run.start})
    return {key: values for key, values in found.items() if key.rpartition(".")[2] != "seed"}


def _name(one: RunEvidence, settings: Mapping[str, Mapping[Path, str]], several: bool) -> str:
    """Name a run by its strategy and the settings in which it differs from others."""
    job = [Path(one.run.start.job.path).stem] if several and one.run.start else []
    values = []
    for key, of in settings.items():
        if one.run.folder in of:  # `splits`, or `compression` of `strategy.compression.name`
            parts = key.split(".")
            values.append(f"{parts[-2] if parts[-1] == 'name' and len(parts) > 1 else parts[-1]} {of[one.run.folder]}")
    return one.name + (f" ({', '.join(job + values)})" if job or values else "")


# --- one run ----------------------------------------------------------------------------------------------------------
def _run(folder: Path, planned: Mapping[str, Any] | None = None, is_virtual: bool = False) -> RunEvidence:
    run, steps = Run(folder), Steps(folder)
    steps.read()
    if planned is None:
        known = run.summary or run.start
        seed = run.settings.get("seed") if run.summary is None else run.summary.seed
        planned = {"name": run.strategy or "unknown", "kind": "strategy", "ranks": known and known.ranks, "seed": seed}
    records = steps.frame
    of_workers = records[records["rank"].isin(records["rank"][records["samples"] > 0])]
    last = of_workers.groupby("rank")["step"].last().max() if len(of_workers) else 0
    return RunEvidence(
        run,
        **{key: planned[key] for key in ("name", "kind", "ranks", "seed")},
        virtual=is_virtual or bool(run.start and run.start.virtual),
        losses=_losses(run, records, of_workers, last),
        evaluations=run.metrics.assign(bytes=_bytes_at(records, run.metrics["step"], last)),
        times=records.groupby("rank")[[f"{part}_s" for part in PARTS]].sum().rename(columns=lambda name: name[:-2]),
    )


def _bytes_at(records: DataFrame, step: Series | np.ndarray, last: int) -> np.ndarray:
    """Return the bytes that all ranks had sent and fetched by a step of the workers; NaN where none is recorded.

    A server's steps are of another number: it is taken to be as far as the workers.
    """
    if not last:
        return np.full(len(step), math.nan)
    part, found = np.minimum(1.0, np.asarray(step, float) / last), np.zeros(len(step))
    for _, sent in (records["bytes_sent"] + records["bytes_fetched"]).groupby(records["rank"]):
        found += np.concatenate([[0], sent.cumsum()])[np.round(part * len(sent)).astype(int)]
    return found


def _losses(run: Run, records: DataFrame, of_workers: DataFrame, last: int) -> DataFrame:
    """Average the training loss over some steps at a time."""
    known = [(0, 0.0), *((one.samples, one.seconds) for one in run.evaluations)]
    total = of_workers["samples"].sum()
    if run.summary is not None and total > known[-1][0]:
        known.append((total, run.summary.wall_s))
    trained = of_workers[(of_workers["samples"] > 0) & (of_workers["losses"] > 0)]
    count = max(1, min(POINTS, last))
    number = ((trained["step"] - 1) * count // max(1, last)).clip(upper=count - 1)
    sums = trained.assign(loss=trained["loss"] * trained["samples"]).groupby(number)[["samples", "loss"]].sum()
    samples = sums["samples"].cumsum()
    points = DataFrame(
        {
            "samples": samples,
            "seconds": np.interp(samples, *np.transpose(known)),
            "bytes": _bytes_at(records, (sums.index.to_numpy() + 1) * last // count, last),
            "loss": sums["loss"] / sums["samples"],
        }
    )
    return points[samples <= known[-1][0]]
