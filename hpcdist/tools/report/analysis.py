"""Compute what runs show: by cell, against the reference, and over numbers of ranks. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from hpcdist.records import Summary
from hpcdist.tools.report.read import Evidence, Point, RankTime, RunEvidence
from hpcdist.tools.report.wording import ROUNDING
from hpcdist.tools.statistics import Effect, Interval, effect, first_reaching, holm, interval, ratio_of

SIGNIFICANT = 0.05  # after Holm's correction
Seed = tuple[int, int]  # and a number that tells runs of one seed from each other


@dataclass(frozen=True)
class CellEvidence:
    """All runs of one name on as many ranks: they differ in their seeds.

    Attributes:
        reached: of each run that has ended: the first evaluation that met the target, or None.
    """

    name: str
    kind: str
    ranks: int
    virtual: bool
    runs: Sequence[RunEvidence]
    metric: str
    reached: dict[Seed, Point | None]

    @property
    def shown(self) -> str:
        """Return the cell's name, which says so where ranks are virtual."""
        return self.name + ", virtual" * self.virtual

    @property
    def label(self) -> str:
        """Return the cell's name with its ranks, for tables."""
        return f"{self.name}, {self.ranks} rank{'s' * (self.ranks > 1)}{', virtual' * self.virtual}"

    @property
    def job(self) -> str | None:
        """Return the name of the job, where it is written down."""
        return next((Path(run.start.job.path).stem for run in self.runs if run.start is not None), None)

    @cached_property
    def ended(self) -> dict[Seed, RunEvidence]:
        """Return the runs that have a result."""
        return _by_seed(run for run in self.runs if run.summary is not None)

    def measure(self, function: Callable[[Summary], float | None]) -> dict[Seed, float]:
        """Return a value of each run that has a finite one."""
        found = {seed: function(run.summary) for seed, run in self.ended.items()}
        return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}

    def mean(self, function: Callable[[Summary], float | None]) -> Interval | None:
        """Return the mean of such values and its interval; None without a value."""
        values = list(self.measure(function).values())
        return interval(values) if values else None

    @cached_property
    def final(self) -> dict[Seed, float]:
        """Return the metric at the end of each run, where it is a number."""
        return self.measure(lambda summary: summary.metrics.get(self.metric))

    @property
    def diverged(self) -> int:
        """Return the number of runs that ended with a metric that is not finite."""
        values = [run.summary.metrics.get(self.metric) for run in self.ended.values()]
        return sum(value is not None and not math.isfinite(value) for value in values)

    @property
    def seconds_to_target(self) -> dict[Seed, float]:
        """Return the seconds to the target of each run that met it."""
        return {seed: point.seconds for seed, point in self.reached.items() if point is not None and point.seconds > 0}

    @property
    def tried(self) -> int:
        """Return the number of runs that have begun, ended or not."""
        return sum(run.summary is not None or run.start is not None for run in self.runs)

    @property
    def all_reached(self) -> bool:
        return 0 < len(self.seconds_to_target) == self.tried

    def spent_to_target(self, what: str) -> Interval | None:
        """Return the mean `bytes` or `joules` at the target; None where a run has not met it, or they are unknown."""
        spent = [getattr(point, what) for point in self.reached.values() if point is not None]
        return interval(spent) if self.all_reached and None not in spent else None

    @property
    def seconds_per_sample(self) -> dict[Seed, float]:
        """Return how long a sample took."""
        return self.measure(lambda s: s.wall_s / s.samples if s.samples and s.wall_s > 0 else None)

    @property
    def total_batch(self) -> int | None:
        """Return the number of samples of one step of all workers together, where runs agree on it."""
        found = {(run.batch, run.summary.workers) for run in self.ended.values()}
        ((batch, workers),) = found if len(found) == 1 else [(None, 0)]
        return None if batch is None else batch * workers

    @property
    def staleness(self) -> dict[int, float]:
        """Return the share of gradients by staleness, of all runs together."""
        counts: Counter[int] = Counter()
        for run in self.ended.values():
            counts.update(run.summary.staleness.histogram)
        return {value: count / counts.total() for value, count in sorted(counts.items())} if counts.total() else {}

    @property
    def times(self) -> dict[int, RankTime]:
        """Return where each rank's seconds went, on average over the runs."""
        ranks = sorted({rank for run in self.ended.values() for rank in run.times})
        of_rank = {rank: [run.times[rank] for run in self.ended.values() if rank in run.times] for rank in ranks}
        return {
            rank: RankTime(
                fmean(time.computing for time in times),
                fmean(time.communicating for time in times),
                fmean(time.waiting for time in times),
            )
            for rank, times in of_rank.items()
        }


@dataclass(frozen=True)
class Contrast:
    """A cell held against another.

    Attributes:
        sooner: how many times sooner the cell was: at the target, or else per sample. None: not known, see `why`.
        better: by how much its metric at the end is above the other's.
        p_sooner, p_better: corrected for all contrasts of the report; NaN where one seed leaves them unknown.
    """

    cell: CellEvidence
    reference: CellEvidence
    sooner: Effect | None
    better: Effect | None
    why: str | None = None
    p_sooner: float = math.nan
    p_better: float = math.nan

    @property
    def same(self) -> bool:
        """Tell whether the metric at the end is the same in every seed, but for rounding."""
        found, ends = self.better, self.cell.final.values()
        return found is not None and max(-found.low, found.high) <= ROUNDING * abs(fmean(ends))


@dataclass(frozen=True)
class ScalingRow:
    """A cell held against one rank.

    Attributes:
        kind: strong, at the same total batch; weak, at the same batch of each worker.
        speedup: T1/Tp, of seconds for as many samples; `efficiency` is T1/(p·Tp).
    """

    kind: str
    cell: CellEvidence
    base: CellEvidence
    speedup: Effect

    @property
    def efficiency(self) -> float:
        return self.speedup.mean / self.cell.ranks


@dataclass(frozen=True)
class Findings:
    """All that the runs show."""

    evidence: Evidence
    cells: Sequence[CellEvidence]
    contrasts: Sequence[Contrast]
    scaling: Sequence[ScalingRow]

    @property
    def failures(self) -> list[RunEvidence]:
        return [run for run in self.evidence.runs if run.failure]


def analyse(evidence: Evidence) -> Findings:
    """Compute everything that a report says."""
    cells = _cells(evidence)
    return Findings(evidence, cells, _contrasts(evidence, cells), _scaling(cells))


# --- cells ------------------------------------------------------------------------------------------------------------
def _cells(evidence: Evidence) -> list[CellEvidence]:
    groups: dict[tuple, list[RunEvidence]] = {}
    for run in evidence.runs:
        groups.setdefault((run.name, run.kind, run.ranks, bool(run.virtual)), []).append(run)
    kinds = ["strategy", "baseline", "serial"]
    order = sorted(groups, key=lambda key: (key[2], kinds.index(key[1]) if key[1] in kinds else 3, key[0]))
    return [
        CellEvidence(
            *key,
            runs=groups[key],
            metric=evidence.metric,
            reached={
                seed: _first(evidence, run)
                for seed, run in _by_seed(run for run in groups[key] if run.summary is not None).items()
            },
        )
        for key in order
    ]


def _by_seed(runs: Iterable[RunEvidence]) -> dict[Seed, RunEvidence]:
    seen: Counter[int] = Counter()
    found = {}
    for run in runs:
        found[run.seed, seen[run.seed]] = run
        seen[run.seed] += 1
    return found


def _first(evidence: Evidence, run: RunEvidence) -> Point | None:
    """Find the first evaluation that meets the target."""
    if evidence.target is None:
        return None
    moments = ((point, point.values.get(evidence.metric, math.nan)) for point in run.evaluations)
    return first_reaching(moments, evidence.target, evidence.higher_is_better)


# --- against the reference --------------------------------------------------------------------------------------------
def _contrasts(evidence: Evidence, cells: Sequence[CellEvidence]) -> list[Contrast]:
    pairs = [(cell, other) for cell in cells for other in cells if _are_compared(cell, other, evidence.reference)]
    if any(cell.ranks > 1 for cell, _ in pairs):  # on one rank nothing is communicated
        pairs = [(cell, other) for cell, other in pairs if other.ranks > 1]
    pairs.sort(key=lambda pair: (pair[0].kind == "serial", -pair[1].ranks))
    found = [_contrast(evidence, cell, reference) for cell, reference in pairs]
    made = [side for contrast in found for side in (contrast.sooner, contrast.better)]
    corrected = holm([math.nan if side is None else side.p for side in made])
    return [
        replace(contrast, p_sooner=corrected[2 * i], p_better=corrected[2 * i + 1]) for i, contrast in enumerate(found)
    ]


def _are_compared(cell: CellEvidence, other: CellEvidence, reference: str) -> bool:
    """Tell whether `other` is the reference for `cell`: on as many ranks, or of one process with as large a batch."""
    if other.name != reference or cell.name == reference or cell.virtual != other.virtual:
        return False
    if None not in (cell.job, other.job) and cell.job != other.job:
        return False
    if cell.kind == "serial":
        return other.ranks > 1 and cell.total_batch is not None and cell.total_batch == other.total_batch
    return cell.ranks == other.ranks


def _contrast(evidence: Evidence, cell: CellEvidence, reference: CellEvidence) -> Contrast:
    why, sooner, times = None, None, ()
    if cell.kind == "serial":
        why = "it is a control of what is learnt; its time is in the section on scaling"
    elif evidence.target is None:
        times = (reference.seconds_per_sample, cell.seconds_per_sample)
        if not all(times):
            why = "a side has no run that ended"
    else:
        times = (reference.seconds_to_target, cell.seconds_to_target)
        if not (reference.all_reached and cell.all_reached):
            why = "not every run reached the target, and a ratio would leave those out that did not"
    if why is None:
        sooner = ratio_of(*times)
    both = cell.final and reference.final and not cell.diverged and not reference.diverged
    return Contrast(cell, reference, sooner, effect(cell.final, reference.final) if both else None, why)


# --- over numbers of ranks --------------------------------------------------------------------------------------------
def _scaling(cells: Sequence[CellEvidence]) -> list[ScalingRow]:
    rows = []
    for cell in cells:
        if cell.ranks == 1 or cell.total_batch is None:
            continue
        workers = next(iter(cell.ended.values())).summary.workers
        for kind, batch in (("weak", cell.total_batch // workers), ("strong", cell.total_batch)):
            base = _base(cells, cell, batch)
            if base is not None and cell.seconds_per_sample:
                rows.append(ScalingRow(kind, cell, base, ratio_of(base.seconds_per_sample, cell.seconds_per_sample)))
    return rows


def _base(cells: Sequence[CellEvidence], cell: CellEvidence, batch: int) -> CellEvidence | None:
    """Find the runs of one rank with this batch: of the same name, or else of one process without extras."""
    alone = [
        other
        for other in cells
        if other.ranks == 1
        and other.kind != "baseline"
        and (other.virtual, other.job) == (cell.virtual, cell.job)
        and other.total_batch == batch
        and other.seconds_per_sample
    ]
    return min(alone, key=lambda o: (o.name != cell.name, o.kind != "serial", len(o.name)), default=None)
