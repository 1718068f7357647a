"""What the study runs: cells of (protocol, modulation, batch, learners), and their results by cell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hpcdist.study import Interval, Run, interval

REFERENCE_BATCH = 128  # B: the batch for which the one learner's rate is chosen


@dataclass(frozen=True)
class Cell:
    """One protocol on λ learners with batches of μ. `splits` is the n of n-softsync, 0 is hardsync."""

    splits: int
    modulation: str
    batch: int
    learners: int
    jitter: float = 0.2  # deviation of a step's time over its mean

    @property
    def protocol(self) -> str:
        if self.splits == 0:
            return "hardsync"
        return "async" if self.splits == self.learners > 1 else f"{self.splits}-softsync"

    @property
    def total_batch(self) -> int:
        """μλ."""
        return self.batch * self.learners

    @property
    def expected_staleness(self) -> float:
        """(λ − 1)/c for updates of c = ⌊λ/n⌋ gradients."""
        return 0.0 if self.splits == 0 else (self.learners - 1) / (self.learners // self.splits)

    def rate(self, rate: float) -> float:
        """The optimiser's rate, from one learner's; hardsync's grows with the root of its batch, as in the paper."""
        return rate * (self.total_batch / REFERENCE_BATCH) ** 0.5 if self.splits == 0 else rate


def hardsync(batch: int, learners: int) -> Cell:
    return Cell(0, "none", batch, learners)


def softsync(splits: int, modulation: str, batch: int, learners: int) -> Cell:
    """Dividing the rate by n = 1 changes nothing: that cell is the one without modulation."""
    return Cell(splits, "none" if splits == 1 and modulation == "average" else modulation, batch, learners)


def one_softsync(batch: int, learners: int) -> Cell:
    return softsync(1, "average", batch, learners)


def asynchronous(batch: int, learners: int, modulation: str = "average") -> Cell:
    return softsync(learners, modulation, batch, learners)


def even(cell: Cell) -> Cell:
    """The same on learners whose steps all take equally long."""
    return replace(cell, jitter=0.0)


PROTOCOLS = {"hardsync": hardsync, "1-softsync": one_softsync, "async": asynchronous}
BASELINE = hardsync(REFERENCE_BATCH, 1)
MODULATIONS = ("none", "average", "per-gradient")


@dataclass(frozen=True)
class Grid:
    """Three protocols on every batch and number of learners; every n and modulation at one of these; controls."""

    batches: tuple[int, ...] = (4, 8, 16, 32)
    learners: tuple[int, ...] = (4, 8, 16, 32)
    probe: tuple[int, int] = (8, 16)  # μ, λ at which n and the modulation vary
    passes: int = 16
    seeds: int = 5

    @property
    def splits(self) -> list[int]:
        """Powers of two up to λ."""
        return [1 << power for power in range(self.probe[1].bit_length())]

    @property
    def diagonal(self) -> list[tuple[int, int]]:
        """(μ, λ) with μλ = B."""
        return [(b, p) for b in self.batches for p in self.learners if b * p == REFERENCE_BATCH]

    def cells(self) -> list[Cell]:
        """All, each once, those of most gradients first."""
        found = [BASELINE]
        for batch in self.batches:
            for learners in self.learners:
                found += [protocol(batch, learners) for protocol in PROTOCOLS.values()]
        found += [softsync(n, modulation, *self.probe) for n in self.splits for modulation in MODULATIONS]
        found += [asynchronous(batch, learners, "none") for batch, learners in self.diagonal]
        found += [even(protocol(self.probe[0], p)) for p in self.learners for protocol in (hardsync, one_softsync)]
        return sorted(dict.fromkeys(found), key=lambda cell: cell.batch)


QUICK = Grid(batches=(32, 64), learners=(2, 4), probe=(32, 4), passes=6, seeds=2)


@dataclass
class Results:
    """The runs of each cell, in the order of their seeds."""

    grid: Grid
    rate: float  # α₀
    runs: dict[Cell, list[Run]] = field(default_factory=dict)

    def measured(self, cell: Cell, name: str) -> list[Any]:
        return [run.measured[name] for run in self.runs[cell]]

    def errors(self, cell: Cell) -> list[float]:
        """Test errors in per cent."""
        return [100 * error for error in self.measured(cell, "error")]

    def error(self, cell: Cell) -> Interval:
        return interval(self.errors(cell))

    def seconds(self, cell: Cell) -> Interval:
        return interval(self.measured(cell, "virtual_s"))

    def staleness(self, cell: Cell) -> Interval:
        return interval(self.measured(cell, "staleness_mean"))

    def histogram(self, cell: Cell) -> dict[int, int]:
        """Gradients per staleness, of all seeds together."""
        total: dict[int, int] = {}
        for histogram in self.measured(cell, "staleness_histogram"):
            for staleness, count in histogram.items():
                total[int(staleness)] = total.get(int(staleness), 0) + count
        return dict(sorted(total.items()))

    def diverged(self, cell: Cell) -> int:
        """Runs that end with more than half of the test samples wrong."""
        return sum(error > 50 for error in self.errors(cell))

    def worse_by(self, cell: Cell, other: Cell) -> Interval:
        """By how many points the error of `cell` is above that of `other`, of runs of the same seed."""
        return interval([a - b for a, b in zip(self.errors(cell), self.errors(other), strict=True)])

    def rows(self) -> Iterable[dict[str, Any]]:
        """The table: one row per cell."""
        for cell in sorted(self.runs, key=lambda c: (c.jitter == 0, c.learners, c.batch, c.splits, c.modulation)):
            yield {
                "protocol": cell.protocol,
                "n": cell.splits or None,
                "modulation": cell.modulation,
                "μ": cell.batch,
                "λ": cell.learners,
                "μλ": cell.total_batch,
                "jitter": f"{cell.jitter:.0%}",
                "error %": f"{self.error(cell):.2f}",
                "diverged": f"{self.diverged(cell)}/{len(self.runs[cell])}",
                "virtual s": f"{self.seconds(cell):.2f}",
                "staleness": f"{self.staleness(cell):.2f}",
                "(λ−1)/c": f"{cell.expected_staleness:.2f}",
                "max": max(self.measured(cell, "staleness_max")),
            }
