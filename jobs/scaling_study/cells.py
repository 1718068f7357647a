"""What the study runs: cells of (strategy, workers, servers), and their results by cell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hpcdist.study import Interval, Run, interval
from scaling_study.training import time_to

SYNCHRONOUS = "allreduce"  # what the others are held against
OPTIONS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {"algorithm": "native"},  # by formula: a ring, every message of which would be simulated, ends alike
    "easgd": {"period": 4, "beta": 0.9},
    "gossip_pull": {},
    "gossip_push": {},
}
STRAGGLERS, EVEN = "stragglers", "even"
SLOW = {STRAGGLERS: 0.01, EVEN: 0.0}  # part of the steps that take slow_factor times as long
FIXED = {
    "hidden": 32,
    "batch": 2,
    "momentum": 0.9,
    "step_s": 0.2,
    "jitter": 0.1,
    "slow_factor": 4.0,
    "transfer_s": 0.0374,  # 46.8 MB at 1.25 GB/s
    "latency_s": 20e-6,
}


@dataclass(frozen=True)
class Cell:
    """A strategy on so many workers; `servers` come on top of them."""

    strategy: str
    workers: int
    servers: int = 0

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.servers} servers" if self.servers > 1 else self.strategy

    def settings(self, grid: Grid, steps: str) -> dict[str, Any]:
        """All that a run depends on, but for rate, seed and code."""
        options = {**OPTIONS[self.strategy], "on_nonfinite": "ignore"}
        if self.servers:
            options["servers"] = self.servers
        cell = {"strategy": self.strategy, "workers": self.workers, "servers": self.servers, "options": options}
        return {**cell, **FIXED, "slow": SLOW[steps], "gradients": grid.gradients, "every": grid.every}

    def guess(self) -> int:
        """The power of 2 at which to look for the best rate first.

        A mean over p samples lets all-reduce's rate grow with p, until curvature ends it.
        """
        doublings = self.workers.bit_length() - 1
        return {SYNCHRONOUS: min(-1, doublings - 7), "easgd": -5}.get(self.strategy, doublings // 2 - 6)


@dataclass(frozen=True)
class Grid:
    """Every strategy on every number of workers; where servers are many, one that is worth them. `seeds` for each."""

    workers: Sequence[int] = (4, 8, 16, 32, 64, 128)
    steps: Sequence[str] = (STRAGGLERS, EVEN)
    sharded: Sequence[int] = (64, 128)  # numbers of workers on which easgd has SHARDS servers too
    gradients: int = 4096  # of all workers together: a multiple of each number of workers
    every: int = 32  # gradients between two looks
    targets: Sequence[float] = (0.35, 0.2)  # test losses
    seeds: int = 5
    tuning_seeds: int = 2

    def cells(self) -> list[Cell]:
        """Those with the most workers first, for they take longest."""
        found = [Cell("easgd", workers, SHARDS) for workers in self.sharded]
        found += [Cell(name, workers, int(name == "easgd")) for name in OPTIONS for workers in self.workers]
        return sorted(found, key=lambda cell: (-cell.workers, cell.strategy, cell.servers))


SHARDS = 4
QUICK = Grid((2, 4), (STRAGGLERS,), sharded=(4,), gradients=768, every=64, targets=(0.8,), seeds=2, tuning_seeds=1)


@dataclass
class Results:
    """With one kind of steps and one target: the runs of each cell, in the order of their seeds, and their rates."""

    grid: Grid
    steps: str
    target: float
    rates: dict[Cell, float]
    runs: dict[Cell, list[Run]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.steps}, to a loss of {self.target:g}"

    def names(self) -> list[str]:
        """Of the strategies, all-reduce first."""
        return sorted({cell.name for cell in self.runs}, key=lambda name: (name.split(",")[0] != SYNCHRONOUS, name))

    def of(self, name: str) -> list[Cell]:
        """A strategy's cells, few workers first."""
        return sorted((cell for cell in self.runs if cell.name == name), key=lambda cell: cell.workers)

    def cell(self, name: str, workers: int) -> Cell | None:
        return next((cell for cell in self.of(name) if cell.workers == workers), None)

    def first(self, cell: Cell) -> Cell:
        """The same strategy on its fewest workers."""
        return self.of(cell.strategy)[0]

    def curves(self, cell: Cell) -> list[list[list[float]]]:
        """(gradients, virtual seconds, test loss) of each look, run by run."""
        return [run.measured["curve"] for run in self.runs[cell]]

    def losses(self, cell: Cell) -> list[float]:
        """At the end, run by run."""
        return [curve[-1][2] for curve in self.curves(cell)]

    def times_s(self, cell: Cell) -> list[float]:
        """To the target, run by run; infinite where it is not reached."""
        return [time_to(curve, self.target) for curve in self.curves(cell)]

    def reached(self, cell: Cell) -> bool:
        """Whether every run has come to the target."""
        return all(map(math.isfinite, self.times_s(cell)))

    def ratio(self, cell: Cell, other: Cell) -> Interval | None:
        """Time to the target over that of another cell, of runs of the same seed; None where one does not reach it."""
        if not (self.reached(cell) and self.reached(other)):
            return None
        return interval([a / b for a, b in zip(self.times_s(cell), self.times_s(other), strict=True)])

    def spread(self, cell: Cell) -> float:
        """Half of the final loss's interval over its mean: how much runs differ."""
        loss = interval(self.losses(cell))
        return loss.half / loss.mean

    def rows(self) -> Iterator[dict[str, Any]]:
        """The table: one row per cell."""
        for name in self.names():
            for cell in self.of(name):
                curves, seconds = self.curves(cell), self.times_s(cell)
                first, reaching = self.first(cell), [s for s in seconds if math.isfinite(s)]
                gained = self.ratio(first, cell) if cell is not first else None
                yield {
                    "strategy": cell.name,
                    "p": cell.workers,
                    "rate": f"{self.rates[cell]:g}",
                    "final loss": f"{interval(self.losses(cell)):.3f}",
                    "s to target": f"{interval(seconds):.1f}" if self.reached(cell) else "",
                    "reached": f"{len(reaching)}/{len(seconds)}",
                    f"faster than on {first.workers}": "" if gained is None else f"{gained:.1f}",
                    "gradients to target": _count(curves, self.target),
                    "s per step": f"{fmean(curve[-1][1] * cell.workers / curve[-1][0] for curve in curves):.3f}",
                }


def _count(curves: Sequence[Sequence[Sequence[float]]], target: float) -> str:
    """Gradients of all workers until the target, on average; empty where a run does not reach it."""
    found = [next((taken for taken, _, loss in curve if loss <= target), None) for curve in curves]
    return "" if None in found else f"{fmean(found):.0f}"
