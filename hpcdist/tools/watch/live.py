"""Follow one run by the files in its folder: its state, curves, speed, and the ranks that hold up the others."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcdist.errors import DataError
from hpcdist.records import (
    Evaluation,
    RecordTail,
    RunRecord,
    StepRecord,
    Summary,
    is_abandoned,
    load_run,
    load_summary,
    read_evaluations,
)
from hpcdist.records.json_values import finite
from hpcdist.tools.watch.series import RankSeries, added, seconds

SLOW = 1.25  # times the others' time for a step without waiting: a straggler
SILENT_S = 30.0  # without new records, after which it is said

Points = list[tuple[float, float]]


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
    """The state of a run, as it is shown; all of JSON's types, with None for numbers that are not finite."""

    name: str
    folder: str
    strategy: str
    state: str  # waiting, starting, training, stopped (no process is at work; it may be resumed) or ended
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
    metrics: dict[str, float | None]  # of the last evaluation
    rate_now: float
    rate_mean: float
    staleness: float
    bytes_per_step: float
    waiting: float  # share of the workers' time
    skipped: int
    starts: int
    lost_ranks: tuple[int, ...]  # that the run goes on without
    silent_s: float | None  # since any rank's last record
    loss_curve: Points = field(default_factory=list)
    metric_curves: dict[str, Points] = field(default_factory=dict)
    ranks: tuple[RankView, ...] = ()

    def plain(self, curves: bool = True) -> dict[str, Any]:
        """Return it as JSON's types, with or without curves and ranks."""
        values = asdict(self)
        for key in () if curves else ("loss_curve", "metric_curves", "ranks"):
            del values[key]
        return finite(values)


class LiveRun:
    """A run that is followed: `update` reads what its files have got since the last call, by their lengths.

    Args:
        brief: read no records of a run that has ended, whose summary says enough, before its curves are asked for.

    Attributes:
        abandoned: no process is at work in it, and it has no summary.
    """

    def __init__(self, folder: Path, name: str, *, brief: bool = False):
        self.folder, self.name = folder, name
        self._brief, self.abandoned = brief, False
        self._tails: dict[int, RecordTail] = {}
        self._series: dict[int, RankSeries] = {}
        self._grew: dict[int, float] = {}  # when a rank's file did, by this process's clock
        self._run: RunRecord | None = None
        self._evaluations: list[Evaluation] = []
        self._summary: Summary | None = None
        self._seen: dict[str, tuple[int, ...]] = {}  # the age and length of files that have been read

    @property
    def ended(self) -> bool:
        return self._summary is not None

    def update(self) -> None:
        """Read what is new."""
        if self.ended:
            return
        abandoned = is_abandoned(self.folder, quiet_s(self.folder))  # before the summary, which a process leaves behind
        summary = self._changed("summary.json")  # looked for before the records, which are whole once it is there
        try:
            if self._changed("run.json"):
                self._run = load_run(self.folder)
            if self._changed("evaluations.jsonl"):
                self._evaluations = read_evaluations(self.folder)
            if not (summary and self._brief):
                self._read_records()
            if summary:
                self._summary = load_summary(self.folder)
            self.abandoned = abandoned and not self.ended
        except (DataError, FileNotFoundError):  # being replaced, or half there on a network file system
            self._seen.clear()

    def _changed(self, name: str) -> bool:
        try:
            stat = (self.folder / name).stat()
        except OSError:
            return False
        seen, self._seen[name] = self._seen.get(name), (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return seen != self._seen[name]

    def _read_records(self) -> None:
        for path in self.folder.glob("records-rank*.jsonl"):
            rank = int(path.stem.removeprefix("records-rank"))
            tail = self._tails.setdefault(rank, RecordTail(path))
            series = self._series.setdefault(rank, RankSeries())
            while items := tail():
                self._grew[rank] = time.monotonic()
                for item in items:
                    series.add(item) if isinstance(item, StepRecord) else series.restart(item)

    # --- the view -------------------------------------------------------------------------------------------------
    def view(self, *, curves: bool = True) -> RunView:
        """Return the run's state as it is known by now, with or without its curves."""
        if curves and not self._tails:  # an ended run's records, which `brief` has left out
            self._read_records()
        totals = {rank: series.total for rank, series in sorted(self._series.items())}
        now = {rank: series.now for rank, series in sorted(self._series.items())}
        workers = [rank for rank, sums in totals.items() if sums["samples"]]
        everything, summary = added(totals.values()), self._summary
        of_workers = added(totals[rank] for rank in workers)
        spent_s = max((seconds(totals[rank]) for rank in workers), default=0.0)
        samples = round(everything["samples"]) if summary is None else summary.samples
        spent_s = spent_s if summary is None else summary.wall_s
        step = max((self._series[rank].step for rank in workers), default=0)
        last = self._evaluations[-1] if self._evaluations else None
        done, limits = self._done(samples, step, spent_s)
        silent_s = time.monotonic() - max(self._grew.values(), default=math.inf)
        rate_now = sum(now[rank]["samples"] / max(1e-9, seconds(now[rank])) for rank in workers if not self.ended)
        losses = [loss for rank in workers if (loss := self._series[rank].loss) is not None]
        return RunView(
            name=self.name,
            folder=str(self.folder),
            strategy=self._strategy,
            state=self._state,
            virtual=bool(getattr(self._run.last, "virtual", None)) if self._run else False,
            ranks_n=self._run.last.ranks if self._run else summary.ranks if summary else len(totals),
            step=max(step, last.step if last else 0),
            epoch=self._epoch(samples, last),
            samples=samples,
            seconds=spent_s,
            fraction=1.0 if self.ended else done,
            left_s=spent_s * (1 / done - 1) if done and not self.ended else None,
            limits=limits,
            loss=statistics.fmean(losses) if losses else None,
            metrics=dict(summary.metrics if summary else last.metrics if last else {}),
            rate_now=rate_now,
            rate_mean=samples / spent_s if spent_s > 0 else 0.0,
            staleness=summary.staleness.mean if summary else everything["staleness"] / max(1, everything["gradients"]),
            bytes_per_step=summary.bytes_per_step if summary else everything["bytes"] / max(1, of_workers["records"]),
            waiting=of_workers["waiting"] / max(1e-9, seconds(of_workers)),
            skipped=round(everything["skipped"]),
            starts=1 + len(self._run.resumed) if self._run else 1,
            lost_ranks=self._lost_ranks,
            silent_s=silent_s if silent_s > SILENT_S and self._state == "training" else None,
            loss_curve=self._loss_curve(workers) if curves else [],
            metric_curves=self._metric_curves() if curves else {},
            ranks=self._ranks(now, workers),
        )

    @property
    def _strategy(self) -> str:
        if self._summary:
            return self._summary.strategy
        return str(self._run.last.settings["strategy"]["name"]) if self._run else ""

    @property
    def _lost_ranks(self) -> tuple[int, ...]:
        if self._summary:
            return tuple(self._summary.lost_ranks)
        return tuple(sorted({rank for series in self._series.values() for rank in series.without}))

    @property
    def _state(self) -> str:
        if self.ended:
            return "ended"
        if self.abandoned or (self._run is not None and self._run.last.ended is not None):
            return "stopped"
        if any(series.recent for series in self._series.values()):
            return "training"
        return "waiting" if self._run is None else "starting"

    def _done(self, samples: int, step: int, spent_s: float) -> tuple[float | None, tuple[str, ...]]:
        """Return the part of the run that is done, by the limit that it reaches first, and all limits in words."""
        if self._run is None:
            return None, ()
        settings, epoch = self._run.last.settings, getattr(self._run.last, "samples", None)
        budget = settings.get("budget") or {}
        done, limits = [], []
        for unit, now in (("samples", samples), ("steps", step), ("seconds", spent_s)):
            if budget.get(unit):
                done.append(now / budget[unit])
                limits.append(f"{budget[unit]:,} {unit}")
        if settings.get("epochs"):
            limits.append(f"{settings['epochs']} epoch{'s' * (settings['epochs'] > 1)}")
            done += [samples / (settings["epochs"] * epoch)] if epoch else []
        return min(1.0, max(done)) if done else None, tuple(limits)

    def _epoch(self, samples: int, last: Evaluation | None) -> int:
        """Return the epoch under way, from 1."""
        epoch = getattr(self._run.last, "samples", None) if self._run else None
        return max(1, -(-samples // epoch)) if epoch else (last.epoch if last else 0) + (not self.ended)

    def _loss_curve(self, workers: list[int]) -> Points:
        width = max((self._series[rank].width for rank in workers), default=1)
        losses: Counter[int] = Counter()
        counts: Counter[int] = Counter()
        for rank in workers:
            series = self._series[rank]
            for key, sums in series.blocks.items():
                block = key * series.width // width
                losses[block] += sums["loss"]
                counts[block] += sums["losses"]
        return [((block + 1) * width, losses[block] / counts[block]) for block in sorted(losses) if counts[block]]

    def _metric_curves(self) -> dict[str, Points]:
        curves: dict[str, Points] = {}
        for evaluation in self._evaluations:
            for name, value in evaluation.metrics.items():
                curves.setdefault(name, []).append((evaluation.step, value))
        return curves

    def _ranks(self, now: dict[int, Counter[str]], workers: list[int]) -> tuple[RankView, ...]:
        own_s = {rank: (now[rank]["computing"] + now[rank]["communicating"]) / now[rank]["records"] for rank in workers}
        freshest = max(self._grew.values(), default=0.0)
        settings = self._run.last.settings if self._run else {}
        stages = settings.get("parallel", {}).get("stages", 1)  # of which one rank records what all have trained on
        at_work = {rank // stages for rank in workers}
        views = []
        for rank, sums in now.items():
            others = [own_s[other] for other in workers if other != rank]
            times = own_s[rank] / statistics.median(others) if rank in own_s and others and min(others) > 0 else 1.0
            silent_s = freshest - self._grew.get(rank, freshest)
            whole = max(seconds(sums), 1e-9)
            views.append(
                RankView(
                    rank=rank,
                    serves=rank // stages not in at_work,
                    step=self._series[rank].step,
                    computing=sums["computing"] / whole,
                    communicating=sums["communicating"] / whole,
                    waiting=sums["waiting"] / whole,
                    slower=times if times > SLOW else None,
                    silent_s=silent_s if silent_s > SILENT_S and not self.ended else None,
                )
            )
        return tuple(views)


def quiet_s(folder: Path) -> float:
    """Return the seconds since a file in the folder was written."""
    written = 0.0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it has just been replaced
                written = max(written, entry.stat().st_mtime)
    return time.time() - written
