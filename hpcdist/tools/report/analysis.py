"""Compute what runs show: by cell, against the reference, and over numbers of ranks. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any

from pandas import DataFrame, Series, concat

from hpcdist.tools.report.results import JobRuns, RunResult
from hpcdist.tools.report.wording import ROUNDING, is_share
from hpcdist.tools.statistics import (
    MIN_SEEDS,
    Effect,
    Interval,
    binomial_variance,
    effect,
    geometric,
    holm,
    interval,
    ratio_of,
)

SIGNIFICANT = 0.05  # after Holm's correction
KINDS = ("strategy", "baseline", "serial")
CELL = ["name", "kind", "ranks", "virtual"]  # runs that agree on these differ in their seeds
Seed = tuple[int, int]  # and a number that tells runs of one seed from each other


@dataclass(frozen=True)
class RunGroup:
    """All runs of one name on as many ranks: they differ in their seeds. `group["wall_s"]` has a number of each run.

    Attributes:
        frame: a row for each run that has ended.
    """

    name: str
    kind: str
    ranks: int
    virtual: bool
    job: JobRuns
    runs: Sequence[RunResult]
    frame: DataFrame

    def __getitem__(self, column: str) -> dict[Seed, float]:
        """Return the numbers of a column of `read_runs`, of each run that has ended with a finite one."""
        if column == "bytes_to_target":  # for which the records of all steps are read
            values = [self.job.bytes_to_target(one) for one in self.ended]
        else:
            values = self.values(column)
        found = zip(self.seeds, values, strict=True)
        return {seed: value for seed, value in found if value is not None and math.isfinite(value)}

    def values(self, column: str) -> list[Any]:
        """Return what each run that has ended has in a column; None where it has nothing."""
        return self.frame[column].tolist() if column in self.frame else [None] * len(self.frame)

    def mean(self, column: str) -> Interval | None:
        """Return the mean of such numbers and its interval, which has no impossible ones; None without any."""
        values = list(self[column].values())
        if not values:
            return None
        if not is_share(column):
            found = interval(values)
            return found if column.startswith("metric.") else found.clipped(0.0, math.inf)
        least = binomial_variance(fmean(values), self.tested) if self.tested else 0.0
        return interval(values, least_variance=least).clipped(0.0, 1.0)

    @cached_property
    def ended(self) -> list[RunResult]:
        """Return the runs that have a result."""
        return [one for one in self.runs if one.run.ended]

    @cached_property
    def seeds(self) -> list[Seed]:
        """Return the seeds of these."""
        numbers = [one.seed for one in self.ended]
        return [(seed, numbers[:i].count(seed)) for i, seed in enumerate(numbers)]

    @cached_property
    def tested(self) -> int | None:
        """Return how many samples the metrics are of; None where runs don't say, or differ."""
        found = {one.run.summary.test_samples for one in self.ended if one.run.summary}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _mark(self) -> str:
        return ", virtual" * (self.virtual and not all(one.virtual for one in self.job.runs))

    @property
    def shown(self) -> str:
        """Return the cell's name, which says so where its ranks are virtual and those of others are not."""
        return self.name + self._mark

    @property
    def label(self) -> str:
        """Return the cell's name with its ranks."""
        return f"{self.name}, {self.ranks} rank{'s' * (self.ranks > 1)}{self._mark}"

    @property
    def title(self) -> str:
        """Return the label with the kind of the runs, for tables."""
        return self.label + ("" if self.kind == "strategy" else f" [{self.kind}]")

    @cached_property
    def final(self) -> dict[Seed, float]:
        """Return the metric at the end of each run, where it is a number."""
        return self[f"metric.{self.job.metric}"]

    @property
    def final_mean(self) -> Interval | None:
        return self.mean(f"metric.{self.job.metric}")

    @property
    def diverged(self) -> int:
        """Return the number of runs that ended with a metric that is not finite."""
        return sum(value is not None for value in self.values(f"metric.{self.job.metric}")) - len(self.final)

    @cached_property
    def seconds_to_target(self) -> dict[Seed, float]:
        """Return the seconds to the target of each run that met it."""
        return {seed: seconds for seed, seconds in self["time_to_target_s"].items() if seconds > 0}

    @property
    def mean_seconds_to_target(self) -> Interval | None:
        """Return the geometric mean of these; None where a run has not met the target, and would be left out."""
        return geometric(list(self.seconds_to_target.values())) if self.all_reached else None

    @property
    def tried(self) -> int:
        """Return the number of runs that have begun, ended or not."""
        return sum(one.run.ended or one.run.start is not None for one in self.runs)

    @property
    def all_reached(self) -> bool:
        return 0 < len(self.seconds_to_target) == self.tried

    @property
    def seconds(self) -> dict[Seed, float]:
        """Return the seconds to the target, none where a run has not met it; without a target those of a sample."""
        if self.job.target is None:
            return self.seconds_per_sample
        return self.seconds_to_target if self.all_reached else {}

    @property
    def mean_seconds(self) -> float:
        """Return the geometric mean of these; infinity where there are none."""
        return geometric(list(self.seconds.values())).mean if self.seconds else math.inf

    @property
    def seconds_per_sample(self) -> dict[Seed, float]:
        samples, seconds = self["samples"], self["wall_s"]
        return {seed: seconds[seed] / n for seed, n in samples.items() if n and seconds[seed] > 0}

    @property
    def samples_per_s(self) -> Interval | None:
        rates = [1 / seconds for seconds in self.seconds_per_sample.values()]
        return interval(rates).clipped(0.0, math.inf) if rates else None

    @property
    def times(self) -> DataFrame:
        """Return where each rank's seconds went, on average over the runs."""
        found = [one.curves.times for one in self.ended if len(one.curves.times)]
        return concat(found).groupby("rank").mean() if found else DataFrame()

    def spent_to_target(self, what: str) -> Interval | None:
        """Return the mean `bytes` or `joules` at the target; None where a run has not met it, or they are unknown."""
        values = self[f"{what}_to_target"].values()
        return self.mean(f"{what}_to_target") if 0 < len(values) == self.tried else None

    @property
    def total_batch(self) -> int | None:
        """Return the number of samples of one step of all workers together, where runs agree on it."""
        found = set(zip((one.run.batch for one in self.ended), self.values("workers"), strict=True))
        ((batch, workers),) = found if len(found) == 1 else [(None, 0)]
        return None if batch is None else batch * workers

    @cached_property
    def staleness(self) -> dict[int, float]:
        """Return the share of gradients by staleness, of all runs together."""
        counts: Counter[int] = Counter()
        for one in self.ended:
            counts.update(one.run.summary.staleness.histogram if one.run.summary else {})
        return {value: count / counts.total() for value, count in sorted(counts.items())} if counts.total() else {}


@dataclass(frozen=True)
class Contrast:
    """A cell held against another.

    Attributes:
        sooner: how many times sooner the cell was: at the target, or else per sample. None: not known, see `why`.
        better: by how much its metric at the end is above the other's.
        p_sooner, p_better: corrected for all contrasts of the report; NaN where too few seeds leave them unknown.
    """

    group: RunGroup
    reference: RunGroup
    sooner: Effect | None
    better: Effect | None
    why: str | None = None
    p_sooner: float = math.nan
    p_better: float = math.nan

    @property
    def same(self) -> bool:
        """Tell whether the metric at the end is the same in every seed, but for rounding."""
        if self.better is None:
            return False
        ours, theirs = self.group.final, self.reference.final
        pairs = ((ours[seed], theirs[seed]) for seed in ours)
        values = pairs if self.better.paired else product(ours.values(), theirs.values())
        return all(math.isclose(*pair, rel_tol=ROUNDING) for pair in values)

    def outcome(self, least_ratio: float = 1.0) -> str:
        """Tell if the cell `wins`, `loses`, is `mixed` (sooner and worse, or the reverse), `alike` or `unknown`.

        Args:
            least_ratio: of times, below which they count as alike.
        """
        sides, signs = (self.group, self.reference), set()
        if self.sooner is not None and self.p_sooner < SIGNIFICANT:
            signs |= {self.sooner.mean > 1} if max(self.sooner.mean, 1 / self.sooner.mean) >= least_ratio else set()
        if self.better is not None and self.p_better < SIGNIFICANT:
            signs.add((self.better.mean > 0) == self.group.job.higher_is_better)
        if all(side.tried >= MIN_SEEDS for side in sides) and not all(side.seconds_to_target for side in sides):
            signs |= {side is self.group for side in sides if side.all_reached}  # the other has not, in any seed
        if signs:
            return "mixed" if len(signs) == 2 else "wins" if True in signs else "loses"
        return "unknown" if math.isnan(self.p_sooner) and math.isnan(self.p_better) else "alike"


@dataclass(frozen=True)
class ScalingRow:
    """A cell held against one rank.

    Attributes:
        kind: strong, at the same total batch; weak, at the same batch of each worker.
        speedup: T1/Tp, of seconds for as many samples; `efficiency` is T1/(p·Tp).
    """

    kind: str
    group: RunGroup
    base: RunGroup
    speedup: Effect

    @property
    def efficiency(self) -> float:
        return self.speedup.mean / self.group.ranks


@dataclass(frozen=True)
class Analysis:
    """All that the runs of a job show.

    Attributes:
        frame: a row for each run, cell by cell, those that failed last.
    """

    job: JobRuns
    frame: DataFrame
    groups: Sequence[RunGroup]
    contrasts: Sequence[Contrast]
    scaling: Sequence[ScalingRow]

    @property
    def runs(self) -> list[RunResult]:
        """Return the runs, one that several kinds share once."""
        return list({one.run.folder: one for one in reversed(self.job.runs)}.values())[::-1]

    @property
    def failures(self) -> list[RunResult]:
        return [one for one in self.runs if one.run.failure]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows with what had been sent at the target, for which the records of all steps are read."""
        frame, runs = self.frame, [one for group in self.groups for one in group.runs]
        if self.job.target is not None:
            sent = [self.job.bytes_to_target(one) if one.run.ended else None for one in runs]
            frame = frame.assign(bytes_to_target=Series(sent, frame.index, dtype=object))
        return frame.to_dict("records")


def analyse(job: JobRuns) -> Analysis:
    """Compute everything that a report says."""
    kinds = [*KINDS, *{one.kind for one in job.runs}]
    runs = sorted(
        job.runs, key=lambda one: (one.ranks, kinds.index(one.kind), one.name, one.virtual, not one.run.ended)
    )
    rows = [job.row(one) for one in runs]
    keys = dict.fromkeys(key for row in rows for key in row)
    frame = DataFrame([[row.get(key) for key in keys] for row in rows], columns=list(keys), dtype=object)
    groups = []
    for _, of_group in frame.groupby(CELL, sort=False):
        members, ended = [runs[number] for number in of_group.index], of_group[of_group["failure"].isna()]
        one = members[0]
        groups.append(RunGroup(one.name, one.kind, one.ranks, one.virtual, job, members, ended))
    return Analysis(job, frame, groups, _contrasts(job, groups), _scaling(groups))


# --- against the reference --------------------------------------------------------------------------------------------
def _contrasts(job: JobRuns, groups: Sequence[RunGroup]) -> list[Contrast]:
    pairs = [(group, other) for group in groups for other in groups if _are_compared(group, other)]
    if any(group.ranks > 1 for group, _ in pairs):  # on one rank nothing is communicated
        pairs = [(group, other) for group, other in pairs if other.ranks > 1]
    pairs.sort(key=lambda pair: (pair[0].kind == "serial", -pair[1].ranks))
    found = [_contrast(group, reference) for group, reference in pairs]
    made = [side for contrast in found for side in (contrast.sooner, contrast.better)]
    corrected = holm([math.nan if side is None else side.p for side in made])
    return [replace(one, p_sooner=corrected[2 * i], p_better=corrected[2 * i + 1]) for i, one in enumerate(found)]


def _are_compared(group: RunGroup, other: RunGroup) -> bool:
    """Tell whether `other` is the reference for `group`: on as many ranks, or of one process with as large a batch."""
    if other.name != group.job.reference or group.name == other.name or group.virtual != other.virtual:
        return False
    if group.kind == "serial":
        return other.ranks > 1 and group.total_batch is not None and group.total_batch == other.total_batch
    return group.ranks == other.ranks


def _contrast(group: RunGroup, reference: RunGroup) -> Contrast:
    why, sooner, better = None, None, None
    if group.kind == "serial":
        why = "it is a control of what is learnt; its time is in the section on scaling"
    elif group.seconds and reference.seconds:
        sooner = ratio_of(reference.seconds, group.seconds)
        if max(sooner.high, 1 / sooner.low) - 1 < ROUNDING:
            sooner = replace(sooner, mean=1.0, low=1.0, high=1.0, p=1.0)
    elif group.job.target is None:
        why = "a side has no run that ended"
    else:
        why = "not every run reached the target, and a ratio would leave those out that did not"
    if group.final and reference.final and not group.diverged and not reference.diverged:
        better = _difference(group, reference)
    return Contrast(group, reference, sooner, better, why)


def _difference(group: RunGroup, reference: RunGroup) -> Effect:
    """Estimate by how much the metric at the end is above the reference's."""
    found = effect(group.final, reference.final)
    if not is_share(group.job.metric):
        return found
    if group.tested and group.tested == reference.tested:
        least = binomial_variance(abs(found.mean), group.tested)
        found = effect(group.final, reference.final, least_variance=least)
    return found.clipped(-1.0, 1.0)


# --- over numbers of ranks --------------------------------------------------------------------------------------------
def _scaling(groups: Iterable[RunGroup]) -> list[ScalingRow]:
    rows = []
    for group in groups:
        if group.ranks == 1 or group.total_batch is None or not group.seconds_per_sample:
            continue
        workers = group.values("workers")[0]
        for kind, batch in (("weak", group.total_batch // workers), ("strong", group.total_batch)):
            # Runs of one rank with this batch: of the same name, or else of one process without extras.
            alone = [other for other in groups if _is_alone(other, group, batch) and other.seconds_per_sample]
            if alone:
                base = min(alone, key=lambda other: (other.name != group.name, other.kind != "serial", len(other.name)))
                rows.append(ScalingRow(kind, group, base, ratio_of(base.seconds_per_sample, group.seconds_per_sample)))
    return rows


def _is_alone(other: RunGroup, group: RunGroup, batch: int) -> bool:
    """Tell whether a cell is of one rank with this batch, and of the same kind of time as `group`."""
    same = other.virtual == group.virtual and other.total_batch == batch
    return same and other.ranks == 1 and other.kind != "baseline"
