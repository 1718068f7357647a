"""The displayed state of the runs in a folder: progress, curves, speed, stragglers."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcdist.errors import ConfigError, DataError
from hpcdist.records import Usage, is_abandoned, record_files
from hpcdist.records.lock import FILE_NAME as LOCK
from hpcdist.tools.console import duration, visible
from hpcdist.tools.runs import FILES, Run, State, Steps, quiet_s, read_comparison

if TYPE_CHECKING:
    from pandas import DataFrame, Series

BELOW = ("*/run.json", "*/*/run.json", "*/*/*/run.json")  # limited depth: it is searched repeatedly
SLOW = 1.25  # a straggler's time per step, without waiting, relative to the others' median
SILENT_S = 30.0  # without new records, before it is reported
ACTIVE = ("starting", "training")  # states of a run
ACTIVE_OR_ENDED = (*ACTIVE, "ended")
PARTS = ("computing", "communicating", "waiting")  # of a rank's time

MAX_RANKS = 16  # whose hardware usage is shown
MAX_POINTS = 4000  # of one figure, over all ranks
FIGURES = ("cores", "memory_bytes", "received_bytes_s", "sent_bytes_s", "gpu", "gpu_memory_bytes")  # of a rank's usage
_WORD = re.compile(r"[^-/ ]+|[-/ ]")

Points = list[tuple[float, float]]


class Moment(NamedTuple):
    """A point of a training curve: its position in the run, and its value."""

    step: float
    samples: float
    seconds: float
    value: float


Curve = list[Moment]


@dataclass(frozen=True)
class RankView:
    """State of one rank: shares of its time in its newest steps."""

    rank: int
    serves: bool
    step: int
    computing: float
    communicating: float
    waiting: float
    slower: float | None  # factor to the others' median, if it is a straggler
    silent_s: float | None  # since its last record, if others continue


@dataclass(frozen=True)
class RunView:
    """Displayed state of a run."""

    name: str
    folder: str
    strategy: str
    state: State
    virtual: bool
    ranks_n: int
    step: int
    epoch: int
    samples: int
    seconds: float
    fraction: float | None  # completed fraction of the run
    left_s: float | None
    limits: tuple[str, ...]  # that end the run, as text
    loss: float | None
    metrics: dict[str, float]  # of the last evaluation
    rate_now: float
    rate_mean: float
    staleness: float
    bytes_per_step: float
    waiting: float  # share of the workers' time
    notes: tuple[str, ...]  # for the user's attention
    loss_curve: Curve = field(default_factory=list)
    metric_curves: dict[str, Curve] = field(default_factory=dict)
    ranks: tuple[RankView, ...] = ()
    # Hardware usage, by FIGURES and rank: (seconds since the run's start, value).
    usage: dict[str, dict[int, Points]] = field(default_factory=dict)
    label: str = ""  # the name without the common parts of all names


class WatchedFolder:
    """The runs of a folder (a run, a comparison, or any folder with runs), including those that start later.

    Raises ConfigError if the folder does not exist.

    Attributes:
        runs: by name, with control characters escaped, as in all texts of a `RunView`.
        planned: number of runs of a comparison; 0: no comparison.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ConfigError(
                f"folder must be a run's, or hold runs; got {folder}, which is not a folder. `hpcdist runs` lists "
                "existing runs."
            )
        self.folder = folder
        self.planned = 0
        self.runs: dict[str, Run] = {}

    @property
    def is_run(self) -> bool:
        return any(run.folder == self.folder for run in self.runs.values())

    @property
    def ended(self) -> bool:
        """Return whether all existing and planned runs have their summaries."""
        return bool(self.runs) and len(self.runs) >= self.planned and all(run.ended for run in self.runs.values())

    @property
    def abandoned(self) -> bool:
        """Return whether no process is running, although runs have no summaries, or there are no runs."""
        unfinished = [run for run in self.runs.values() if not run.ended]
        if self.ended or not all(run.abandoned for run in unfinished):
            return False
        if not (self.folder / LOCK).exists():  # unrelated runs, no comparison
            return bool(unfinished)
        folders = [self.folder, *(run.folder for run in self.runs.values())]
        return is_abandoned(self.folder, min(map(quiet_s, folders)))

    def update(self) -> None:
        """Read new content of the runs' files, and find new runs."""
        for run in self.runs.values():
            run.update()
        for name, path in self._find_runs().items():
            if name not in self.runs:
                self.runs[name] = Run(path, follow=True)

    def views(self, *, curves: bool = False) -> list[RunView]:
        brief, labels = not self.is_run, short_names(list(self.runs))
        return [
            replace(view(name, run, curves=curves, brief=brief), label=label)
            for label, (name, run) in zip(labels, self.runs.items())
        ]

    def left_s(self, views: Sequence[RunView]) -> float | None:
        """Estimate the seconds until all runs have ended; None if no run is training, or nothing is known yet.

        A run that has not started is assumed to take the others' mean time, with as many concurrent runs as now.
        """
        active = [run_view for run_view in views if run_view.state in ACTIVE]
        # `done`: number of ended runs, in which a half-finished run counts 0.5. `lost`: runs without result.
        lost = sum(run_view.state not in ACTIVE and run_view.state != "ended" for run_view in views)
        done = sum(
            1.0 if run_view.state == "ended" else run_view.fraction or 0.0
            for run_view in views
            if run_view.state in ACTIVE_OR_ENDED
        )
        if not active or not done:
            return None
        starts = [self.runs[run_view.name].start for run_view in views if run_view.state in ACTIVE_OR_ENDED]
        spent_s = sum(start.took_s for start in starts if start is not None)
        return spent_s / done * (max(self.planned, len(views)) - lost - done) / len(active)

    def _find_runs(self) -> dict[str, Path]:
        """Return the runs' folders by name; of a comparison in the order of its plan."""
        if record_files(self.folder) or any((self.folder / name).exists() for name in FILES):
            return {visible(self.folder.resolve().name): self.folder}
        try:
            plan = read_comparison(self.folder)
        except DataError:  # being replaced
            return {}
        if plan is None or not plan["runs"]:
            paths = sorted(path.parent for pattern in BELOW for path in self.folder.glob(pattern))
            return {visible(path.relative_to(self.folder)): path for path in paths}
        self.planned = len({run["folder"] for run in plan["runs"]})
        folders = [self.folder / run["folder"] for run in plan["runs"]]
        return {visible(path.name): path for path in folders if path.is_dir()}


def short_names(names: Sequence[str]) -> list[str]:
    """Remove common prefixes and suffixes: `digits-softsync-4`, `digits-gossip-4` become `softsync`, `gossip`."""
    parts_by_name = [_WORD.findall(name) for name in names]
    for end in (0, -1):
        while len(names) > 1 and min(map(len, parts_by_name)) > 1 and len({parts[end] for parts in parts_by_name}) == 1:
            for parts in parts_by_name:
                del parts[end]
    short = ["".join(parts).strip("-/ ") for parts in parts_by_name]
    return short if all(short) and len(set(short)) == len(set(names)) else list(names)


# --- one run ----------------------------------------------------------------------------------------------------------
def view(name: str, run: Run, *, curves: bool = True, brief: bool = False) -> RunView:
    """Return a run's current state; with `curves` also the curves and the hardware usage.

    `brief`: of a finished run without curves, read only the summary, not the records, unless these have been read.
    """
    summary_only = brief and run.ended and not curves and not run.has_read_steps  # then `steps` stays empty
    steps = Steps(run.folder) if summary_only else run.steps
    recent = steps.recent[steps.recent["rank"] < run.start.ranks] if run.start else steps.recent  # not of former ranks
    totals, newest_sums = _sums(steps.frame), _sums(recent)
    workers = totals.index[totals["samples"] > 0]  # servers, and all but one rank of a pipeline, record no samples
    stages = run.settings.get("parallel", {}).get("stages", 1)
    workers = workers if len(workers) else totals.index[(totals.index + 1) % stages == 0]  # a loop without hd.shard
    overall, worker_totals, summary = totals.sum(), totals.loc[workers].sum(), run.summary
    last = run.evaluations[-1] if run.evaluations else None
    samples = int(overall["samples"]) if summary is None else summary.samples
    spent_s = max(totals.loc[workers, "seconds"], default=0.0) if summary is None else summary.wall_s
    step = int(max(newest_sums["step"][newest_sums.index.isin(workers)], default=0))
    newest = summary or last  # with metrics
    epoch_samples = run.start.samples if run.start else None
    done, limits = _completed_fraction(run, samples, step, spent_s)
    active = newest_sums.loc[newest_sums.index.isin(workers)]
    losses = [loss for rank, loss in steps.losses.items() if rank in active.index]
    return RunView(
        name=name,
        folder=str(run.folder),
        strategy=visible(run.strategy),
        state=run.state,
        virtual=bool(run.start and run.start.virtual),
        ranks_n=run.start.ranks if run.start else summary.ranks if summary else len(totals),
        step=max(step, last.step if last else 0),
        epoch=max(1, -(-samples // epoch_samples)) if epoch_samples else (last.epoch if last else 0) + (not run.ended),
        samples=samples,
        seconds=spent_s,
        fraction=1.0 if run.ended else done,
        left_s=spent_s * (1 / done - 1) if done and run.state in ACTIVE else None,
        limits=limits,
        loss=statistics.fmean(losses) if losses else None,
        metrics={visible(name): value for name, value in newest.metrics.items()} if newest else {},
        rate_now=0.0 if run.ended else float((active["samples"] / active["seconds"].clip(lower=1e-9)).sum()),
        rate_mean=samples / spent_s if spent_s > 0 else 0.0,
        staleness=summary.staleness.mean if summary else overall["staleness"] / max(1, overall["gradients"]),
        bytes_per_step=summary.bytes_per_step if summary else overall["bytes"] / max(1, worker_totals["records"]),
        waiting=worker_totals["waiting_s"] / max(1e-9, worker_totals["seconds"]),
        notes=tuple(map(visible, _notes(run, steps, int(worker_totals["skipped"])))),
        loss_curve=_loss_curve(steps, workers) if curves else [],
        metric_curves=_metric_curves(run) if curves else {},
        usage=_usage(run.resources) if curves else {},
        label=name,
        ranks=_ranks(run, steps, newest_sums, list(workers)),
    )


def _sums(frame: DataFrame) -> DataFrame:
    """Return a row per rank: its newest step, the sums of the other columns, and of these the seconds and the bytes."""
    groups = frame.groupby("rank")
    sums = groups.sum().assign(step=groups["step"].last())
    seconds = sums["computing_s"] + sums["communicating_s"] + sums["waiting_s"]
    return sums.assign(seconds=seconds, bytes=sums["bytes_sent"] + sums["bytes_fetched"])


def _completed_fraction(run: Run, samples: int, step: int, spent_s: float) -> tuple[float | None, tuple[str, ...]]:
    """Return the completed fraction of the run, by the limit that it reaches first, and all limits as text."""
    budget, epochs = run.settings.get("budget") or {}, run.settings.get("epochs")
    fractions, limits = [], []
    for unit, reached in (("samples", samples), ("steps", step), ("seconds", spent_s)):
        if budget.get(unit):
            fractions.append(reached / budget[unit])
            limits.append(f"{budget[unit]:,} {unit}")
    if epochs:
        limits.append(f"{epochs} epoch{'s' * (epochs > 1)}")
        fractions += [samples / (epochs * run.start.samples)] if run.start and run.start.samples else []
    return min(1.0, max(fractions)) if fractions else None, tuple(limits)


def _notes(run: Run, steps: Steps, skipped: int) -> list[str]:
    """Return sentences about the run that need the user's attention."""
    silent_s = time.monotonic() - max(steps.grew_s.values(), default=math.inf)
    lost = run.summary.lost_ranks if run.summary else steps.lost_ranks
    starts = 1 + len(run.record.resumed) if run.record else 1
    return [
        text
        for text, is_so in (
            ("it is dead: no process is running in its folder, for unknown reasons; resume with --resume",
             run.state == "dead"),
            ((run.failure or "").replace(":\n", ": ").replace("\n", " | "), run.state in ("failed", "interrupted")),
            (run.damage or "", run.damage is not None),
            (f"no rank has written a record for {duration(max(0.0, silent_s))}: see the run's own messages",
             silent_s > SILENT_S and run.state == "training"),
            (f"it continued without rank {', '.join(map(str, lost))}", lost),
            (f"{skipped} steps skipped for NaN or infinite gradients", skipped),
            (f"start {starts} of this run", starts > 1),
        )
        if is_so
    ]  # fmt: skip


def _loss_curve(steps: Steps, workers: Sequence[int]) -> Curve:
    """Return the mean training loss of the workers over steps, samples and seconds."""
    # A row of the frame is a block of a rank's steps; use the longest block's number of steps for all ranks.
    width = max((steps.widths[rank] for rank in workers), default=1)
    frame = steps.frame[steps.frame["rank"].isin(workers)]
    seconds = frame["computing_s"] + frame["communicating_s"] + frame["waiting_s"]
    blocks = frame.assign(seconds=seconds).groupby(-(-frame["step"] // width) * width)
    sums = blocks[["samples", "seconds", "loss", "losses"]].sum()
    mean_s = sums["seconds"] / blocks["rank"].nunique()  # a run may continue on other ranks
    sums = sums.assign(samples=sums["samples"].cumsum(), seconds=mean_s.cumsum())
    sums = sums[sums["losses"] > 0]
    columns = (sums.index, sums["samples"], sums["seconds"], sums["loss"] / sums["losses"])
    return [Moment(*values) for values in zip(*(column.tolist() for column in columns))]


def _metric_curves(run: Run) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for evaluation in run.evaluations:
        position = evaluation.step, evaluation.samples, evaluation.seconds
        for name, value in evaluation.metrics.items():
            curves.setdefault(visible(name), []).append(Moment(*position, value))
    return curves


def _usage(samples: Mapping[int, Sequence[Usage]]) -> dict[str, dict[int, Points]]:
    """Return, by figure and rank, the first MAX_RANKS ranks' hardware usage; many samples are averaged over blocks."""
    by_rank = dict(list(samples.items())[:MAX_RANKS])
    started = min((usages[0].time for usages in by_rank.values() if usages), default=0.0)
    usage: dict[str, dict[int, Points]] = {}
    for rank, rank_samples in by_rank.items():
        size = -(-len(rank_samples) * len(by_rank) // MAX_POINTS)
        blocks = [rank_samples[first : first + size] for first in range(0, len(rank_samples), max(1, size))]
        for name in FIGURES:
            block_values = [(block[-1].time - started, [getattr(usages, name) for usages in block]) for block in blocks]
            points = [(time, statistics.fmean(numbers)) for time, numbers in block_values if None not in numbers]
            if points:
                usage.setdefault(name, {})[rank] = points
    return usage


def _ranks(run: Run, steps: Steps, now: DataFrame, workers: Sequence[int]) -> tuple[RankView, ...]:
    """Return the ranks' states, and which are stragglers (see SLOW). `now`: sums over the newest steps, by rank."""
    busy_s: Series = (now["computing_s"] + now["communicating_s"]) / now["records"]
    freshest = max(steps.grew_s.values(), default=0.0)
    stages = run.settings.get("parallel", {}).get("stages", 1)  # one rank of a pipeline records the samples
    worker_replicas = {rank // stages for rank in workers}
    views = []
    for rank, sums in now.iterrows():
        others = busy_s[busy_s.index.isin(workers) & (busy_s.index != rank)]
        factor = busy_s[rank] / others.median() if rank in workers and len(others) and others.min() > 0 else 1.0
        silent_s = freshest - steps.grew_s.get(rank, freshest)
        views.append(
            RankView(
                rank=int(rank),
                serves=rank // stages not in worker_replicas,
                step=int(sums["step"]),
                **{part: float(sums[f"{part}_s"] / max(sums["seconds"], 1e-9)) for part in PARTS},
                slower=float(factor) if factor > SLOW else None,
                silent_s=silent_s if silent_s > SILENT_S and not run.ended else None,
            )
        )
    return tuple(views)
