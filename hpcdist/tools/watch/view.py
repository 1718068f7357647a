"""The runs of a folder as they are shown: states, curves, speed, and the ranks that hold up the others."""

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
from hpcdist.tools.console import duration
from hpcdist.tools.runs import FILES, Run, State, Steps, quiet_s, read_comparison

if TYPE_CHECKING:
    from pandas import DataFrame, Series

BELOW = ("*/run.json", "*/*/run.json", "*/*/*/run.json")  # deeper ones are not looked for: it is done again and again
SLOW = 1.25  # times the others' time for a step without waiting: a straggler
SILENT_S = 30.0  # without new records, after which it is said
AT_WORK = ("starting", "training")  # states of a run
DOING = (*AT_WORK, "ended")
PARTS = ("computing", "communicating", "waiting")  # of a rank's time

MOST_RANKS = 16  # whose use of the hardware is shown
MOST_POINTS = 4000  # of one figure of all ranks' use together
FIGURES = ("cores", "memory_bytes", "received_bytes_s", "sent_bytes_s", "gpu", "gpu_memory_bytes")  # of a rank's usage
_WORD = re.compile(r"[^-/ ]+|[-/ ]")

Points = list[tuple[float, float]]


class Moment(NamedTuple):
    """A point of a curve of training: where in the run it is, and the value there."""

    step: float
    samples: float
    seconds: float
    value: float


Curve = list[Moment]


@dataclass(frozen=True)
class RankView:
    """One rank: where its time goes in its newest steps, as shares of it."""

    rank: int
    serves: bool
    step: int
    computing: float
    communicating: float
    waiting: float
    slower: float | None  # by this factor than the others, where it is a straggler
    silent_s: float | None  # since its last record, where others go on


@dataclass(frozen=True)
class RunView:
    """The state of a run, as it is shown."""

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
    fraction: float | None  # of the run that is done
    left_s: float | None
    limits: tuple[str, ...]  # that end the run, in words
    loss: float | None
    metrics: dict[str, float]  # of the last evaluation
    rate_now: float
    rate_mean: float
    staleness: float
    bytes_per_step: float
    waiting: float  # share of the workers' time
    notes: tuple[str, ...]  # what the user should look at
    loss_curve: Curve = field(default_factory=list)
    metric_curves: dict[str, Curve] = field(default_factory=dict)
    ranks: tuple[RankView, ...] = ()
    # What ranks use of the hardware, by FIGURES and rank: points with seconds since the run began.
    usage: dict[str, dict[int, Points]] = field(default_factory=dict)
    label: str = ""  # the name without what all runs' names have in common


class WatchedFolder:
    """The runs of a folder, those included that begin later: one run's own, a comparison's, or one that holds runs.

    Attributes:
        runs: by their names.
        planned: number of runs that a comparison will have; 0 elsewhere.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ConfigError(
                f"folder must be a run's, or hold runs; got {folder}, which is no folder. `hpcdist runs` lists the "
                "runs that are there."
            )
        self.folder = folder
        self.planned = 0
        self.runs: dict[str, Run] = {}

    @property
    def is_run(self) -> bool:
        """Tell whether the folder is a run's own."""
        return any(run.folder == self.folder for run in self.runs.values())

    @property
    def ended(self) -> bool:
        """Tell whether nothing more is to come: all runs that are there, or planned, have their summaries."""
        return bool(self.runs) and len(self.runs) >= self.planned and all(run.ended for run in self.runs.values())

    @property
    def abandoned(self) -> bool:
        """Tell whether no process is at work any more, though there are runs without summaries, or none at all."""
        left = [run for run in self.runs.values() if not run.ended]
        if self.ended or not all(run.abandoned for run in left):
            return False
        if not (self.folder / LOCK).exists():  # runs that have no more in common than their folder
            return bool(left)
        folders = [self.folder, *(run.folder for run in self.runs.values())]
        return is_abandoned(self.folder, min(map(quiet_s, folders)))

    def update(self) -> None:
        """Read what the files of all runs have got, and look for new runs."""
        for run in self.runs.values():
            run.update()
        for name, path in self._found().items():
            if name not in self.runs:
                self.runs[name] = Run(path, follow=True)

    def views(self, *, curves: bool = False) -> list[RunView]:
        """Return the state of each run, with or without its curves."""
        brief, labels = not self.is_run, short_names(list(self.runs))
        return [
            replace(view(name, run, curves=curves, brief=brief), label=label)
            for label, (name, run) in zip(labels, self.runs.items())
        ]

    def left_s(self, views: Sequence[RunView]) -> float | None:
        """Estimate the seconds until all runs have ended; None if none is at work, or nothing is known yet.

        A run that has not begun takes as long as the others on average; as many go on at a time as now.
        """
        at_work = [one for one in views if one.state in AT_WORK]
        lost = sum(one.state not in AT_WORK and one.state != "ended" for one in views)
        done = sum(1.0 if one.state == "ended" else one.fraction or 0.0 for one in views if one.state in DOING)
        if not at_work or not done:
            return None
        starts = [self.runs[one.name].start for one in views if one.state in DOING]
        spent_s = sum(start.took_s for start in starts if start is not None)
        return spent_s / done * (max(self.planned, len(views)) - lost - done) / len(at_work)

    def _found(self) -> dict[str, Path]:
        """Find the runs by their names; of a comparison in the order of its plan."""
        if record_files(self.folder) or any((self.folder / name).exists() for name in FILES):
            return {self.folder.resolve().name: self.folder}
        try:
            plan = read_comparison(self.folder)
        except DataError:  # it is being replaced
            return {}
        if plan is None or not plan["runs"]:
            paths = sorted(path.parent for pattern in BELOW for path in self.folder.glob(pattern))
            return {str(path.relative_to(self.folder)): path for path in paths}
        self.planned = len({run["folder"] for run in plan["runs"]})
        folders = [self.folder / run["folder"] for run in plan["runs"]]
        return {path.name: path for path in folders if path.is_dir()}


def short_names(names: Sequence[str]) -> list[str]:
    """Cut the words that all names begin and end with: of digits-softsync-4 and digits-gossip-4 leave the second."""
    words = [_WORD.findall(name) for name in names]
    for at in (0, -1):
        while len(names) > 1 and min(map(len, words)) > 1 and len({one[at] for one in words}) == 1:
            for one in words:
                del one[at]
    short = ["".join(one).strip("-/ ") for one in words]
    return short if all(short) and len(set(short)) == len(set(names)) else list(names)


# --- one run ----------------------------------------------------------------------------------------------------------
def view(name: str, run: Run, *, curves: bool = True, brief: bool = False) -> RunView:
    """Return a run's state as it is known by now.

    Args:
        curves: also the curves.
        brief: read no records of a run that has ended only to show it without curves: its summary says enough.
    """
    unread = brief and run.ended and not curves and not run.has_read_steps
    steps = Steps(run.folder) if unread else run.steps
    totals, now = _sums(steps.frame), _sums(steps.recent)
    workers = totals.index[totals["samples"] > 0]
    everything, of_workers, summary = totals.sum(), totals.loc[workers].sum(), run.summary
    newest = steps.recent.groupby("rank")["step"].last()
    last = run.evaluations[-1] if run.evaluations else None
    samples = int(everything["samples"]) if summary is None else summary.samples
    spent_s = max(totals.loc[workers, "seconds"], default=0.0) if summary is None else summary.wall_s
    step = int(max(newest[newest.index.isin(workers)], default=0))
    epoch_samples = run.start.samples if run.start else None
    done, limits = _done(run, samples, step, spent_s)
    at_work = now.loc[now.index.isin(workers)]
    losses = [loss for rank, loss in steps.losses.items() if rank in workers]
    return RunView(
        name=name,
        folder=str(run.folder),
        strategy=run.strategy,
        state=run.state,
        virtual=bool(run.start and run.start.virtual),
        ranks_n=run.start.ranks if run.start else summary.ranks if summary else len(totals),
        step=max(step, last.step if last else 0),
        epoch=max(1, -(-samples // epoch_samples)) if epoch_samples else (last.epoch if last else 0) + (not run.ended),
        samples=samples,
        seconds=spent_s,
        fraction=1.0 if run.ended else done,
        left_s=spent_s * (1 / done - 1) if done and run.state in AT_WORK else None,
        limits=limits,
        loss=statistics.fmean(losses) if losses else None,
        metrics=dict(summary.metrics if summary else last.metrics if last else {}),
        rate_now=0.0 if run.ended else float((at_work["samples"] / at_work["seconds"].clip(lower=1e-9)).sum()),
        rate_mean=samples / spent_s if spent_s > 0 else 0.0,
        staleness=summary.staleness.mean if summary else everything["staleness"] / max(1, everything["gradients"]),
        bytes_per_step=summary.bytes_per_step if summary else everything["bytes"] / max(1, of_workers["records"]),
        waiting=of_workers["waiting_s"] / max(1e-9, of_workers["seconds"]),
        notes=tuple(_notes(run, steps, int(everything["skipped"]))),
        loss_curve=_loss_curve(steps, workers) if curves else [],
        metric_curves=_metric_curves(run) if curves else {},
        usage=_usage(run.resources) if curves else {},
        label=name,
        ranks=_ranks(run, steps, now, list(workers)),
    )


def _sums(frame: DataFrame) -> DataFrame:
    """Add up the steps of each rank, with its seconds and its bytes."""
    sums = frame.groupby("rank").sum()
    seconds = sums["computing_s"] + sums["communicating_s"] + sums["waiting_s"]
    return sums.assign(seconds=seconds, bytes=sums["bytes_sent"] + sums["bytes_fetched"])


def _done(run: Run, samples: int, step: int, spent_s: float) -> tuple[float | None, tuple[str, ...]]:
    """Return the part of the run that is done, by the limit that it reaches first, and all limits in words."""
    budget, epochs = run.settings.get("budget") or {}, run.settings.get("epochs")
    done, limits = [], []
    for unit, now in (("samples", samples), ("steps", step), ("seconds", spent_s)):
        if budget.get(unit):
            done.append(now / budget[unit])
            limits.append(f"{budget[unit]:,} {unit}")
    if epochs:
        limits.append(f"{epochs} epoch{'s' * (epochs > 1)}")
        done += [samples / (epochs * run.start.samples)] if run.start and run.start.samples else []
    return min(1.0, max(done)) if done else None, tuple(limits)


def _notes(run: Run, steps: Steps, skipped: int) -> list[str]:
    silent_s = time.monotonic() - max(steps.grew_s.values(), default=math.inf)
    lost = run.summary.lost_ranks if run.summary else steps.lost_ranks
    starts = 1 + len(run.record.resumed) if run.record else 1
    return [
        text
        for text, is_so in (
            ("it is dead: no process works in its folder any more, and nothing says why; --resume goes on with it",
             run.state == "dead"),
            ((run.failure or "").replace(":\n", ": ").replace("\n", " | "), run.state in ("failed", "interrupted")),
            (run.damage or "", run.damage is not None),
            (f"no rank has written a record for {duration(max(0.0, silent_s))}: see the run's own messages",
             silent_s > SILENT_S and run.state == "training"),
            (f"it went on without rank {', '.join(map(str, lost))}", lost),
            (f"{skipped} steps skipped for NaN or infinite gradients", skipped),
            (f"start {starts} of this run", starts > 1),
        )
        if is_so
    ]  # fmt: skip


def _loss_curve(steps: Steps, workers: Sequence[int]) -> Curve:
    width = max((steps.widths[rank] for rank in workers), default=1)
    frame = steps.frame[steps.frame["rank"].isin(workers)]
    seconds = frame["computing_s"] + frame["communicating_s"] + frame["waiting_s"]
    blocks = frame.assign(seconds=seconds / max(1, len(workers))).groupby(-(-frame["step"] // width) * width)
    sums = blocks[["samples", "seconds", "loss", "losses"]].sum()
    sums = sums.assign(samples=sums["samples"].cumsum(), seconds=sums["seconds"].cumsum())
    sums = sums[sums["losses"] > 0]
    columns = (sums.index, sums["samples"], sums["seconds"], sums["loss"] / sums["losses"])
    return [Moment(*values) for values in zip(*(column.tolist() for column in columns))]


def _metric_curves(run: Run) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for one in run.evaluations:
        for name, value in one.metrics.items():
            curves.setdefault(name, []).append(Moment(one.step, one.samples, one.seconds, value))
    return curves


def _usage(samples: Mapping[int, Sequence[Usage]]) -> dict[str, dict[int, Points]]:
    """Return what the first ranks use over time, as means over equal numbers of samples where these are many."""
    shown = dict(list(samples.items())[:MOST_RANKS])
    began = min((one[0].time for one in shown.values() if one), default=0.0)
    usage: dict[str, dict[int, Points]] = {}
    for rank, own in shown.items():
        size = -(-len(own) * len(shown) // MOST_POINTS)
        parts = [own[first : first + size] for first in range(0, len(own), max(1, size))]
        for name in FIGURES:
            values = [(part[-1].time - began, [getattr(one, name) for one in part]) for part in parts]
            points = [(time, statistics.fmean(found)) for time, found in values if None not in found]
            if points:
                usage.setdefault(name, {})[rank] = points
    return usage


def _ranks(run: Run, steps: Steps, now: DataFrame, workers: Sequence[int]) -> tuple[RankView, ...]:
    own_s: Series = (now["computing_s"] + now["communicating_s"]) / now["records"]
    newest = steps.recent.groupby("rank")["step"].last()
    freshest = max(steps.grew_s.values(), default=0.0)
    stages = run.settings.get("parallel", {}).get("stages", 1)  # of which one rank records what all have trained on
    at_work = {rank // stages for rank in workers}
    views = []
    for rank, sums in now.iterrows():
        others = own_s[own_s.index.isin(workers) & (own_s.index != rank)]
        times = own_s[rank] / others.median() if rank in workers and len(others) and others.min() > 0 else 1.0
        silent_s = freshest - steps.grew_s.get(rank, freshest)
        views.append(
            RankView(
                rank=int(rank),
                serves=rank // stages not in at_work,
                step=int(newest[rank]),
                **{part: float(sums[f"{part}_s"] / max(sums["seconds"], 1e-9)) for part in PARTS},
                slower=float(times) if times > SLOW else None,
                silent_s=silent_s if silent_s > SILENT_S and not run.ended else None,
            )
        )
    return tuple(views)
