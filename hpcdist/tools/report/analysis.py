"""Statistics of runs: by group, against the reference, and over numbers of ranks. No input or output."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product
from statistics import fmean
from typing import Any

from pandas import DataFrame, concat

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
Seed = tuple[int, int]  # and a counter for repeated seeds


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same name and number of ranks, and different seeds. `group["wall_s"]` has each run's value.

    Attributes:
        rows: `JobRuns.row` of each run; all groups have the same columns.
    """

    name: str
    kind: str
    ranks: int
    virtual: bool
    job: JobRuns
    runs: Sequence[RunResult]
    rows: Sequence[Mapping[str, Any]]

    def __getitem__(self, column: str) -> dict[Seed, float]:
        """Return the finite values of a column of `read_runs`, by seed."""
        if column == "bytes_to_target":  # needs the records of all steps
            values = [self.job.bytes_to_target(result) for result in self.ended]
        else:
            values = self.values(column)
        pairs = zip(self.seeds, values, strict=True)
        return {seed: value for seed, value in pairs if value is not None and math.isfinite(value)}

    def values(self, column: str) -> list[Any]:
        """Return the column's value of each finished run; None if it has none."""
        return [row.get(column) for row in self.rows if row["failure"] is None]

    def mean(self, column: str) -> Interval | None:
        """Return the mean of a column with its confidence interval, clipped to possible values; None without values.

        What was spent until the target has no mean if a run did not reach it, or has no record of it.
        """
        values = list(self[column].values())
        if not values or (column.endswith("_to_target") and len(values) < self.n_started):
            return None
        if not is_share(column):
            estimate = interval(values)
            return estimate if column.startswith("metric.") else estimate.clipped(0.0, math.inf)
        min_variance = binomial_variance(fmean(values), self.tested) if self.tested else 0.0
        return interval(values, min_variance=min_variance).clipped(0.0, 1.0)

    @cached_property
    def ended(self) -> list[RunResult]:
        """Return the runs that have a result."""
        return [result for result in self.runs if result.run.ended]

    @cached_property
    def seeds(self) -> list[Seed]:
        """Return the seed of each finished run, with a counter for repeated seeds."""
        numbers = [result.seed for result in self.ended]
        return [(seed, numbers[:i].count(seed)) for i, seed in enumerate(numbers)]

    @cached_property
    def tested(self) -> int | None:
        """Return the number of test samples; None if the runs don't record it or differ."""
        counts = {result.run.summary.test_samples for result in self.ended if result.run.summary}
        return counts.pop() if len(counts) == 1 else None

    @cached_property
    def _virtual_suffix(self) -> str:
        return ", virtual" * (self.virtual and not all(result.virtual for result in self.job.runs))

    @property
    def display_name(self) -> str:
        """Return the group's name; it says "virtual" if other groups of the report ran on real ranks."""
        return self.name + self._virtual_suffix

    @property
    def label(self) -> str:
        """Return the display name with the number of ranks."""
        return f"{self.name}, {self.ranks} rank{'s' * (self.ranks > 1)}{self._virtual_suffix}"

    @property
    def title(self) -> str:
        """Return the label for tables, which names baselines and serial controls."""
        return self.label + ("" if self.kind == "strategy" else f" [{self.kind}]")

    @cached_property
    def final(self) -> dict[Seed, float]:
        """Return the final metric of each run by seed, if finite."""
        return self[f"metric.{self.job.metric}"]

    @property
    def final_mean(self) -> Interval | None:
        return self.mean(f"metric.{self.job.metric}")

    @property
    def diverged(self) -> int:
        """Return the number of runs whose final metric is NaN or infinite."""
        return sum(value is not None for value in self.values(f"metric.{self.job.metric}")) - len(self.final)

    @cached_property
    def seconds_to_target(self) -> dict[Seed, float]:
        """Return the seconds to the target by seed, of the runs that reached it."""
        return {seed: seconds for seed, seconds in self["time_to_target_s"].items() if seconds > 0}

    @property
    def mean_seconds_to_target(self) -> Interval | None:
        """Return the geometric mean of the seconds to the target; None unless all runs reached it."""
        return geometric(list(self.seconds_to_target.values())) if self.all_reached else None

    @property
    def n_started(self) -> int:
        return sum(result.run.ended or result.run.start is not None for result in self.runs)

    @property
    def all_reached(self) -> bool:
        return 0 < len(self.seconds_to_target) == self.n_started

    @property
    def seconds(self) -> dict[Seed, float]:
        """Return the times to compare: to the target (empty unless all runs reached it); per sample if no run did."""
        if not self.job.has_reached:
            return self.seconds_per_sample
        return self.seconds_to_target if self.all_reached else {}

    @property
    def mean_seconds(self) -> float:
        """Return the geometric mean of `seconds`; infinity if empty."""
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
        """Return the seconds of each rank by activity (PARTS), averaged over the runs."""
        frames = [result.curves.times for result in self.ended if len(result.curves.times)]
        return concat(frames).groupby("rank").mean() if frames else DataFrame()

    @property
    def total_batch(self) -> int | None:
        """Return the samples of one step of all workers; None if unknown or different between runs."""
        sizes = set(zip((result.run.batch for result in self.ended), self.values("workers"), strict=True))
        ((batch, workers),) = sizes if len(sizes) == 1 else [(None, 0)]
        return None if batch is None else batch * workers

    @cached_property
    def staleness(self) -> dict[int, float]:
        """Return the share of gradients by staleness, over all runs."""
        counts: Counter[int] = Counter()
        for result in self.ended:
            counts.update(result.run.summary.staleness.histogram if result.run.summary else {})
        return {value: count / counts.total() for value, count in sorted(counts.items())} if counts.total() else {}


@dataclass(frozen=True)
class Contrast:
    """A group compared with the reference.

    Attributes:
        speedup: ratio of times, reference / group: to the target, or per sample. None: unknown, see `why`.
        difference: difference of the final metric, group - reference.
        p_speedup, p_difference: p-values after Holm's correction for all comparisons of the report; NaN: too few seeds.
    """

    group: RunGroup
    reference: RunGroup
    speedup: Effect | None
    difference: Effect | None
    why: str | None = None
    p_speedup: float = math.nan
    p_difference: float = math.nan

    @property
    def same(self) -> bool:
        """Return whether the final metrics are equal in every seed, up to rounding."""
        if self.difference is None:
            return False
        finals, reference_values = self.group.final, self.reference.final
        pairs = ((finals[seed], reference_values[seed]) for seed in finals)
        values = pairs if self.difference.paired else product(finals.values(), reference_values.values())
        return all(math.isclose(*pair, rel_tol=ROUNDING) for pair in values)

    def outcome(self, min_ratio: float = 1.0) -> str:
        """Return how the group does: `wins`, `loses`, `mixed` (faster and worse, or the reverse), `tied` or `unknown`.

        Args:
            min_ratio: smaller ratios of times count as tied.
        """
        groups, better = (self.group, self.reference), set()  # by each significant difference: is the group better?
        if self.speedup is not None and self.p_speedup < SIGNIFICANT:
            better |= {self.speedup.mean > 1} if max(self.speedup.mean, 1 / self.speedup.mean) >= min_ratio else set()
        if self.difference is not None and self.p_difference < SIGNIFICANT:
            better.add((self.difference.mean > 0) == self.group.job.higher_is_better)
        if all(group.n_started >= MIN_SEEDS for group in groups) and not all(
            group.seconds_to_target for group in groups
        ):
            better |= {group is self.group for group in groups if group.all_reached}  # the other group never did
        if better:
            return "mixed" if len(better) == 2 else "wins" if True in better else "loses"
        return "unknown" if math.isnan(self.p_speedup) and math.isnan(self.p_difference) else "tied"


@dataclass(frozen=True)
class ScalingRow:
    """Speedup of a group over one rank.

    Attributes:
        kind: strong (the same total batch) or weak (the same batch of each worker).
        speedup: T1/Tp, for the same number of samples; `efficiency` is T1/(p·Tp).
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
    """All statistics of a job's runs."""

    job: JobRuns
    groups: Sequence[RunGroup]
    contrasts: Sequence[Contrast]
    scaling: Sequence[ScalingRow]

    @property
    def runs(self) -> list[RunResult]:
        """Return the runs; a run that several groups share is listed once."""
        return list({result.run.folder: result for result in reversed(self.job.runs)}.values())[::-1]

    @property
    def failures(self) -> list[RunResult]:
        return [result for result in self.runs if result.run.failure]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return a dict per run, with the bytes sent until the target, which needs the records of all steps."""
        pairs = [pair for group in self.groups for pair in zip(group.runs, group.rows, strict=True)]
        if self.job.target is None:
            return [{**row} for _, row in pairs]
        sent = [self.job.bytes_to_target(result) if result.run.ended else None for result, _ in pairs]
        return [{**row, "bytes_to_target": n_bytes} for (_, row), n_bytes in zip(pairs, sent)]


def analyse(job: JobRuns) -> Analysis:
    """Compute the statistics of a job's runs."""
    kinds = [*KINDS, *{result.kind for result in job.runs}]  # sort order: also of kinds that a study adds
    runs = sorted(job.runs, key=lambda r: (r.ranks, kinds.index(r.kind), r.name, r.virtual, not r.run.ended))
    rows = [(result, job.row(result)) for result in runs]
    columns = dict.fromkeys(column for _, row in rows for column in row)
    groups = []
    for _, pairs in groupby(rows, lambda pair: pair[0].cell):
        members, of_group = zip(*pairs)
        name, kind, ranks, virtual = members[0].cell
        groups.append(RunGroup(name, kind, ranks, virtual, job, members, [columns | row for row in of_group]))
    return Analysis(job, groups, _contrasts(job, groups), _scaling(groups))


# --- against the reference --------------------------------------------------------------------------------------------
def _contrasts(job: JobRuns, groups: Sequence[RunGroup]) -> list[Contrast]:
    """Compare all groups with their references, and correct the p-values for the number of comparisons."""
    pairs = [(group, other) for group in groups for other in groups if _is_reference(group, other)]
    if any(group.ranks > 1 for group, _ in pairs):  # one rank doesn't communicate
        pairs = [(group, other) for group, other in pairs if other.ranks > 1]
    pairs.sort(key=lambda pair: (pair[0].kind == "serial", -pair[1].ranks))
    contrasts = [_contrast(group, reference) for group, reference in pairs]
    effects = [item for contrast in contrasts for item in (contrast.speedup, contrast.difference)]
    corrected = holm([math.nan if item is None else item.p for item in effects])
    return [replace(c, p_speedup=corrected[2 * i], p_difference=corrected[2 * i + 1]) for i, c in enumerate(contrasts)]


def _is_reference(group: RunGroup, other: RunGroup) -> bool:
    """Return whether `other` is the reference of `group`: the same ranks, or for one process the same total batch."""
    if other.name != group.job.reference or group.name == other.name or group.virtual != other.virtual:
        return False
    if group.kind == "serial":
        return other.ranks > 1 and group.total_batch is not None and group.total_batch == other.total_batch
    return group.ranks == other.ranks


def _contrast(group: RunGroup, reference: RunGroup) -> Contrast:
    """Compare a group with its reference by time and by final metric."""
    why, speedup, difference = None, None, None
    if group.kind == "serial":
        why = "a serial control compares metrics only; see its time under scaling"
    elif group.seconds and reference.seconds:
        speedup = ratio_of(reference.seconds, group.seconds)
        if max(speedup.high, 1 / speedup.low) - 1 < ROUNDING:  # equal
            speedup = replace(speedup, mean=1.0, low=1.0, high=1.0, p=1.0)
    elif not group.job.has_reached:
        why = "one of the groups has no finished run"
    else:
        why = "not every run reached the target"
    if group.final and reference.final and not group.diverged and not reference.diverged:
        difference = _difference(group, reference)
    return Contrast(group, reference, speedup, difference, why)


def _difference(group: RunGroup, reference: RunGroup) -> Effect:
    """Estimate the difference of the final metric to the reference's; an accuracy's noise includes the test set's."""
    estimate = effect(group.final, reference.final)
    if not is_share(group.job.metric):
        return estimate
    if group.tested and group.tested == reference.tested:
        min_variance = binomial_variance(abs(estimate.mean), group.tested)
        estimate = effect(group.final, reference.final, min_variance=min_variance)
    return estimate.clipped(-1.0, 1.0)


# --- over numbers of ranks --------------------------------------------------------------------------------------------
def _scaling(groups: Iterable[RunGroup]) -> list[ScalingRow]:
    """Return weak and strong scaling of each group on several ranks that has a suitable group on one rank."""
    rows = []
    for group in groups:
        if group.ranks == 1 or group.total_batch is None or not group.seconds_per_sample:
            continue
        workers = group.values("workers")[0]
        for kind, batch in (("weak", group.total_batch // workers), ("strong", group.total_batch)):
            # One rank with this batch: the same strategy if possible, or a serial control.
            bases = [other for other in groups if _is_scaling_base(other, group, batch) and other.seconds_per_sample]
            if bases:
                base = min(bases, key=lambda other: (other.name != group.name, other.kind != "serial", len(other.name)))
                rows.append(ScalingRow(kind, group, base, ratio_of(base.seconds_per_sample, group.seconds_per_sample)))
    return rows


def _is_scaling_base(other: RunGroup, group: RunGroup, batch: int) -> bool:
    """Return whether `other` ran on one rank with this batch, with the same kind of clock as `group`."""
    same = other.virtual == group.virtual and other.total_batch == batch
    return same and other.ranks == 1 and other.kind != "baseline"
