"""Compute what runs show: by cell, against the reference, and over numbers of ranks. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from pandas import DataFrame, concat

from hpcdist.tools.report.evidence import Evidence, RunEvidence
from hpcdist.tools.report.wording import ROUNDING
from hpcdist.tools.statistics import Effect, GeometricMean, Interval, effect, geometric, holm, interval, ratio_of

SIGNIFICANT = 0.05  # after Holm's correction
KINDS = ("strategy", "baseline", "serial")
Seed = tuple[int, int]  # and a number that tells runs of one seed from each other


@dataclass(frozen=True)
class Cell:
    """All runs of one name on as many ranks: they differ in their seeds. `cell["wall_s"]` has a number of each run."""

    name: str
    kind: str
    ranks: int
    virtual: bool
    runs: Sequence[RunEvidence]
    evidence: Evidence

    def __getitem__(self, column: str) -> dict[Seed, float]:
        """Return the numbers of a column of `read_runs`, of each run that has ended with a finite one."""
        if column == "bytes_to_target":  # for which the records of all steps are read
            found = {seed: self.evidence.bytes_to_target(one) for seed, one in self.ended.items()}
        else:
            found = {seed: row.get(column) for seed, row in self.rows.items()}
        return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}

    def mean(self, column: str) -> Interval | None:
        """Return the mean of such numbers and its interval; None without any."""
        values = list(self[column].values())
        return interval(values) if values else None

    @property
    def shown(self) -> str:
        """Return the cell's name, which says so where its ranks are virtual and those of others are not."""
        return self.name + self._mark

    @property
    def label(self) -> str:
        """Return the cell's name with its ranks."""
        return f"{self.name}, {self.ranks} rank{'s' * (self.ranks > 1)}{self._mark}"

    @cached_property
    def _mark(self) -> str:
        return ", virtual" * (self.virtual and not all(one.virtual for one in self.evidence.runs))

    @property
    def title(self) -> str:
        """Return the label with the kind of the runs, for tables."""
        return self.label + ("" if self.kind == "strategy" else f" [{self.kind}]")

    @cached_property
    def ended(self) -> dict[Seed, RunEvidence]:
        """Return the runs that have a result."""
        seen: Counter[int] = Counter()
        found = {}
        for one in self.runs:
            if one.run.ended:
                found[one.seed, seen[one.seed]] = one
                seen[one.seed] += 1
        return found

    @cached_property
    def rows(self) -> dict[Seed, dict[str, Any]]:
        """Return all numbers of the runs that have a result."""
        return {seed: self.evidence.row(one) for seed, one in self.ended.items()}

    @cached_property
    def final(self) -> dict[Seed, float]:
        """Return the metric at the end of each run, where it is a number."""
        return self[f"metric.{self.evidence.metric}"]

    @property
    def final_mean(self) -> Interval | None:
        return self.mean(f"metric.{self.evidence.metric}")

    @property
    def diverged(self) -> int:
        """Return the number of runs that ended with a metric that is not finite."""
        return sum(f"metric.{self.evidence.metric}" in row for row in self.rows.values()) - len(self.final)

    @cached_property
    def seconds_to_target(self) -> dict[Seed, float]:
        """Return the seconds to the target of each run that met it."""
        return {seed: seconds for seed, seconds in self["time_to_target_s"].items() if seconds > 0}

    @property
    def mean_seconds_to_target(self) -> GeometricMean | None:
        """Return the mean of these; None where a run has not met the target, and would be left out."""
        return geometric(list(self.seconds_to_target.values())) if self.all_reached else None

    @property
    def tried(self) -> int:
        """Return the number of runs that have begun, ended or not."""
        return sum(one.run.ended or one.run.start is not None for one in self.runs)

    @property
    def all_reached(self) -> bool:
        return 0 < len(self.seconds_to_target) == self.tried

    def spent_to_target(self, what: str) -> Interval | None:
        """Return the mean `bytes` or `joules` at the target; None where a run has not met it, or they are unknown."""
        values = self[f"{what}_to_target"].values()
        return interval(list(values)) if 0 < len(values) == self.tried else None

    @property
    def seconds_per_sample(self) -> dict[Seed, float]:
        samples, seconds = self["samples"], self["wall_s"]
        return {seed: seconds[seed] / n for seed, n in samples.items() if n and seconds[seed] > 0}

    @property
    def samples_per_s(self) -> Interval | None:
        rates = [1 / seconds for seconds in self.seconds_per_sample.values()]
        return interval(rates) if rates else None

    @property
    def total_batch(self) -> int | None:
        """Return the number of samples of one step of all workers together, where runs agree on it."""
        found = {(one.run.batch, self.rows[seed]["workers"]) for seed, one in self.ended.items()}
        ((batch, workers),) = found if len(found) == 1 else [(None, 0)]
        return None if batch is None else batch * workers

    @property
    def workers(self) -> int:
        return next(iter(self.rows.values()))["workers"]

    @cached_property
    def staleness(self) -> dict[int, float]:
        """Return the share of gradients by staleness, of all runs together."""
        counts: Counter[int] = Counter()
        for one in self.ended.values():
            counts.update(one.run.summary.staleness.histogram if one.run.summary else {})
        return {value: count / counts.total() for value, count in sorted(counts.items())} if counts.total() else {}

    @property
    def times(self) -> DataFrame:
        """Return where each rank's seconds went, on average over the runs."""
        found = [one.curves.times for one in self.ended.values() if len(one.curves.times)]
        return concat(found).groupby("rank").mean() if found else DataFrame()


@dataclass(frozen=True)
class Contrast:
    """A cell held against another.

    Attributes:
        sooner: how many times sooner the cell was: at the target, or else per sample. None: not known, see `why`.
        better: by how much its metric at the end is above the other's.
        p_sooner, p_better: corrected for all contrasts of the report; NaN where one seed leaves them unknown.
    """

    cell: Cell
    reference: Cell
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

    @property
    def standing(self) -> str:
        """Tell if the cell `wins`, `loses`, is `mixed` (sooner and worse, or the reverse), `alike` or `unknown`."""
        higher, signs = self.cell.evidence.higher_is_better, set()
        if self.sooner is not None and self.p_sooner < SIGNIFICANT:
            signs.add(self.sooner.mean > 1)
        if self.better is not None and self.p_better < SIGNIFICANT:
            signs.add((self.better.mean > 0) == higher)
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
    cell: Cell
    base: Cell
    speedup: Effect

    @property
    def efficiency(self) -> float:
        return self.speedup.mean / self.cell.ranks


@dataclass(frozen=True)
class Findings:
    """All that the runs show."""

    evidence: Evidence
    cells: Sequence[Cell]
    contrasts: Sequence[Contrast]
    scaling: Sequence[ScalingRow]

    @property
    def failures(self) -> list[RunEvidence]:
        return [one for one in self.evidence.runs if one.run.failure]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of all runs, cell by cell, those that failed last; each has the same keys."""
        found = []
        for cell in self.cells:
            ended = [dict(row) for row in cell.rows.values()]
            if self.evidence.target is not None:
                for row, one in zip(ended, cell.ended.values(), strict=True):
                    row["bytes_to_target"] = self.evidence.bytes_to_target(one)
            found += [*ended, *(self.evidence.row(one) for one in cell.runs if not one.run.ended)]
        keys = list(dict.fromkeys(key for row in found for key in row))
        return [{key: row.get(key) for key in keys} for row in found]


def analyse(evidence: Evidence) -> Findings:
    """Compute everything that a report says."""
    groups: dict[tuple[str, str, int, bool], list[RunEvidence]] = {}
    for one in evidence.runs:
        groups.setdefault((one.name, one.kind, one.ranks, one.virtual), []).append(one)
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    order = sorted(groups, key=lambda key: (key[2], kinds.get(key[1], len(kinds)), key[0]))
    cells = [Cell(*key, runs=groups[key], evidence=evidence) for key in order]
    return Findings(evidence, cells, _contrasts(evidence, cells), _scaling(cells))


# --- against the reference --------------------------------------------------------------------------------------------
def _contrasts(evidence: Evidence, cells: Sequence[Cell]) -> list[Contrast]:
    pairs = [(cell, other) for cell in cells for other in cells if _are_compared(cell, other, evidence.reference)]
    if any(cell.ranks > 1 for cell, _ in pairs):  # on one rank nothing is communicated
        pairs = [(cell, other) for cell, other in pairs if other.ranks > 1]
    pairs.sort(key=lambda pair: (pair[0].kind == "serial", -pair[1].ranks))
    found = [_contrast(evidence, cell, reference) for cell, reference in pairs]
    made = [side for contrast in found for side in (contrast.sooner, contrast.better)]
    corrected = holm([math.nan if side is None else side.p for side in made])
    return [replace(one, p_sooner=corrected[2 * i], p_better=corrected[2 * i + 1]) for i, one in enumerate(found)]


def _are_compared(cell: Cell, other: Cell, reference: str) -> bool:
    """Tell whether `other` is the reference for `cell`: on as many ranks, or of one process with as large a batch."""
    if other.name != reference or cell.name == reference or cell.virtual != other.virtual:
        return False
    if cell.kind == "serial":
        return other.ranks > 1 and cell.total_batch is not None and cell.total_batch == other.total_batch
    return cell.ranks == other.ranks


def _contrast(evidence: Evidence, cell: Cell, reference: Cell) -> Contrast:
    why, sooner = None, None
    if cell.kind == "serial":
        why = "it is a control of what is learnt; its time is in the section on scaling"
    elif evidence.target is None:
        if cell.seconds_per_sample and reference.seconds_per_sample:
            sooner = ratio_of(reference.seconds_per_sample, cell.seconds_per_sample)
        else:
            why = "a side has no run that ended"
    elif reference.all_reached and cell.all_reached:
        sooner = ratio_of(reference.seconds_to_target, cell.seconds_to_target)
    else:
        why = "not every run reached the target, and a ratio would leave those out that did not"
    both = cell.final and reference.final and not cell.diverged and not reference.diverged
    return Contrast(cell, reference, sooner, effect(cell.final, reference.final) if both else None, why)


# --- over numbers of ranks --------------------------------------------------------------------------------------------
def _scaling(cells: Iterable[Cell]) -> list[ScalingRow]:
    rows = []
    for cell in cells:
        if cell.ranks == 1 or cell.total_batch is None or not cell.seconds_per_sample:
            continue
        for kind, batch in (("weak", cell.total_batch // cell.workers), ("strong", cell.total_batch)):
            # Runs of one rank with this batch: of the same name, or else of one process without extras.
            alone = [other for other in cells if _is_alone(other, cell, batch) and other.seconds_per_sample]
            if alone:
                base = min(alone, key=lambda other: (other.name != cell.name, other.kind != "serial", len(other.name)))
                rows.append(ScalingRow(kind, cell, base, ratio_of(base.seconds_per_sample, cell.seconds_per_sample)))
    return rows


def _is_alone(other: Cell, cell: Cell, batch: int) -> bool:
    """Tell whether a cell is of one rank with this batch, and of the same kind of time as `cell`."""
    same = other.virtual == cell.virtual and other.total_batch == batch
    return same and other.ranks == 1 and other.kind != "baseline"
