"""Read runs, or a comparison, from their folders; nothing is computed here but sums over step records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from hpcdist.config import differing
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import Evaluation, Start, StepRecord, Summary, load_run, load_summary, read_evaluations
from hpcdist.records import read_records as read_steps
from hpcdist.tools.runs import FAILURE

POINTS = 60  # of a curve of losses
LAST_LINES = 4  # of a run that failed
LOWER_IS_BETTER = ("loss", "error", "rmse", "mse", "mae", "perplexity")  # parts of names of metrics
REFERENCE = "allreduce"  # the strategy that others are compared with, where nobody says another


@dataclass(frozen=True)
class Point:
    """A moment of a run: all that had been spent, and what had come of it."""

    samples: float
    seconds: float
    bytes: float | None  # sent and fetched by all ranks; None where no step was recorded
    values: Mapping[str, float]
    joules: float | None = None  # where they were measured


@dataclass(frozen=True)
class RankTime:
    """Where a rank's seconds went."""

    computing: float
    communicating: float
    waiting: float


@dataclass(frozen=True)
class RunEvidence:
    """One run, as its folder has it.

    Attributes:
        name: of its cell: runs of one name, number of ranks and kind of time differ in their seeds.
        kind: strategy, serial or baseline.
        failure: why there is no result; None where there is one.
        losses, evaluations: moments with the mean training loss since the one before; with the metrics of a test.
        times: by rank.
    """

    folder: Path
    name: str
    kind: str
    ranks: int
    seed: int
    summary: Summary | None = None
    start: Start | None = None
    failure: str | None = None
    virtual: Mapping[str, Any] | None = None
    losses: Sequence[Point] = ()
    evaluations: Sequence[Point] = ()
    times: Mapping[int, RankTime] = field(default_factory=dict)

    @property
    def batch(self) -> int | None:
        """Return the number of samples of a step of one worker, where it is written down."""
        settings = {} if self.start is None else self.start.settings
        return settings["batch_size"] * settings.get("accumulation", 1) if "batch_size" in settings else None


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


def read(folders: Sequence[Path], target: tuple[str, float] | None = None) -> Evidence:
    """Read a comparison's folder, or any folders with runs at any depth.

    Args:
        target: a metric and the value of it to be reached, before those that a comparison names.

    Raises:
        ConfigError: there is no run, or none has the target's metric.
        DataError: a file is damaged.
    """
    declared = [path for folder in folders if (path := folder / "comparison.json").exists()]
    evidence = _comparison(declared[0]) if declared and len(folders) == 1 else _loose(folders)
    if target is not None:
        name, value = target
        known = sorted({key for run in evidence.runs if run.summary for key in run.summary.metrics})
        if name not in known:
            raise ConfigError(f"--target must name a metric of the runs, {', '.join(known)}; got {name}.")
        better = evidence.higher_is_better if name == evidence.metric else is_higher_better(name)
        evidence = replace(evidence, metric=name, target=value, higher_is_better=better)
    return evidence


def is_higher_better(metric: str) -> bool:
    """Guess by a metric's name whether more of it is better."""
    return not any(part in metric.lower() for part in LOWER_IS_BETTER)


# --- folders of runs --------------------------------------------------------------------------------------------------
def _comparison(path: Path) -> Evidence:
    try:
        said = json.loads(path.read_bytes())
        planned, metric = said["runs"], said["metric"]
        runs = [_run(path.parent / run["folder"], run) for run in planned]
        evidence = Evidence(
            title=said["job"],
            metric=metric,
            higher_is_better=said.get("higher_is_better", is_higher_better(metric)),
            target=said.get("target"),
            budget=said.get("budget") or {},
            tuning=said.get("tuning"),
            reference=said["reference"],
            runs=[replace(run, virtual=run.virtual or said.get("virtual")) for run in runs],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} must be what `hpcdist compare` writes; got {type(error).__name__}: {error}. Make it again."
        ) from None
    return replace(evidence, settings=_settings(evidence.runs))


def _loose(folders: Sequence[Path]) -> Evidence:
    """Read runs that nobody planned: those are alike whose settings are, but for the seed."""
    files = {path for folder in folders for name in ("run.json", "summary.json") for path in folder.glob(f"**/{name}")}
    tuning = {path.parent / "tuning" for folder in folders for path in folder.glob("**/comparison.json")}
    found = [_run(folder) for folder in sorted({path.parent for path in files}) if not tuning & set(folder.parents)]
    if not any(run.summary for run in found):
        named = ", ".join(map(str, folders))
        raise ConfigError(f"folders must hold a run that has ended; got none in {named}. Give a folder of runs.")
    settings = _settings(found)
    several = len({run.start.job.path for run in found if run.start}) > 1
    runs = [replace(run, name=_name(run, settings, several)) for run in found]
    metrics = [name for run in runs if run.summary for name in run.summary.metrics]
    metric = next((name for name in metrics if name != "loss"), "loss")
    names = list(dict.fromkeys(run.name for run in runs if run.summary))
    return Evidence(
        title=", ".join(map(str, folders)),
        metric=metric,
        higher_is_better=is_higher_better(metric),
        reference=next((name for name in names if name.split()[0] == REFERENCE), names[0]),
        runs=runs,
        settings=settings,
    )


def _settings(runs: Iterable[RunEvidence]) -> dict[str, dict[Path, str]]:
    found = differing({run.folder: run.start.settings for run in runs if run.start})
    return {key: values for key, values in found.items() if key.rpartition(".")[2] != "seed"}


def _name(run: RunEvidence, settings: Mapping[str, Mapping[Path, str]], several: bool) -> str:
    """Name a run by its strategy and the settings in which it differs from others."""
    values = [f"{_short(key)} {of[run.folder]}" for key, of in settings.items() if run.folder in of]
    job = [Path(run.start.job.path).stem] if several and run.start else []
    return run.name + (f" ({', '.join(job + values)})" if job or values else "")


def _short(key: str) -> str:
    """Cut a dotted key short: to `splits`, or to `compression` from `strategy.compression.name`."""
    parts = key.split(".")
    return parts[-2] if parts[-1] == "name" and len(parts) > 1 else parts[-1]


# --- one run ----------------------------------------------------------------------------------------------------------
def _run(folder: Path, planned: Mapping[str, Any] | None = None) -> RunEvidence:
    record = load_run(folder)
    start = None if record is None else record.last
    summary = load_summary(folder) if (folder / "summary.json").exists() else None
    steps = read_steps(folder) if any(folder.glob("records-rank*.jsonl")) else {}
    settings = {} if start is None else start.settings
    if planned is None:
        strategy = settings.get("strategy", {}).get("name", "unknown") if summary is None else summary.strategy
        ranks = start.ranks if summary is None and start else summary.ranks
        planned = {"name": strategy, "kind": "strategy", "ranks": ranks, "seed": settings.get("seed")}
        if summary is not None:
            planned["seed"] = summary.seed
    evaluations, progress = read_evaluations(folder), _Progress(steps)
    return RunEvidence(
        folder=folder,
        **{key: planned[key] for key in ("name", "kind", "ranks", "seed")},
        summary=summary,
        start=start,
        failure=None if summary else _failure(folder, start),
        virtual=None if start is None else start.virtual,
        losses=progress.losses(evaluations, None if summary is None else summary.wall_s),
        evaluations=[
            Point(one.samples, one.seconds, progress.bytes_at(one.step), one.metrics, one.joules) for one in evaluations
        ],
        times={rank: _time(of_rank) for rank, of_rank in steps.items()},
    )


def _failure(folder: Path, start: Start | None) -> str:
    """Say why a run has no result: by its last lines, where whoever made it has written them down."""
    if (folder / FAILURE).exists():
        lines = [line for line in (folder / FAILURE).read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(["failed:", *lines[-LAST_LINES:]])
    if start is None:
        return "was not made"
    return "has begun and not ended" if start.ended is None else f"failed, and ended at {start.ended}"


def _time(records: Sequence[StepRecord]) -> RankTime:
    return RankTime(
        sum(record.computing_s for record in records),
        sum(record.communicating_s for record in records),
        sum(record.waiting_s for record in records),
    )


class _Progress:
    """Tell how far a run was, by its step records.

    A worker's steps are those of the run. A server's are of another number: it is taken to be as far as the workers.
    """

    def __init__(self, steps: Mapping[int, Sequence[StepRecord]]):
        self._traffic = {
            rank: list(accumulate((r.bytes_sent + r.bytes_fetched for r in of_rank), initial=0))
            for rank, of_rank in steps.items()
        }
        self._workers = [of_rank for of_rank in steps.values() if any(record.samples for record in of_rank)]
        self._last = max((of_rank[-1].step for of_rank in self._workers), default=0)

    def bytes_at(self, step: int) -> float | None:
        """Return the bytes that all ranks had sent and fetched by a step of the workers."""
        if not self._last:
            return None
        part = min(1.0, step / self._last)
        return float(sum(sums[round(part * (len(sums) - 1))] for sums in self._traffic.values()))

    def losses(self, evaluations: Sequence[Evaluation], wall_s: float | None) -> list[Point]:
        """Average the training loss over some steps at a time."""
        points, count = [], max(1, min(POINTS, self._last))
        samples = 0
        known = [(0, 0.0), *((one.samples, one.seconds) for one in evaluations)]
        total = sum(record.samples for of_rank in self._workers for record in of_rank)
        if wall_s is not None and total > known[-1][0]:
            known.append((total, wall_s))
        bins: list[list[StepRecord]] = [[] for _ in range(count)]
        for of_rank in self._workers:
            for record in of_rank:
                if record.samples and record.loss is not None:
                    bins[min(count - 1, (record.step - 1) * count // self._last)].append(record)
        for number, records in enumerate(bins, 1):
            here = sum(record.samples for record in records)
            samples += here
            if here and samples <= known[-1][0]:
                loss = sum(record.loss * record.samples for record in records) / here
                where = self.bytes_at(number * self._last // count)
                points.append(Point(samples, _seconds_at(samples, known), where, {"loss": loss}))
        return points


def _seconds_at(samples: float, known: Sequence[tuple[float, float]]) -> float:
    """Interpolate between moments of which samples and seconds are known."""
    for (before, start), (after, end) in pairwise(known):
        if samples <= after:
            return start + (end - start) * (samples - before) / max(1, after - before)
    return known[-1][1]
