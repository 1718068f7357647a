"""Sweep settings of a job with one strategy: a grid or random points, of which halving goes on with the best."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist import strategies
from hpcdist.config.files import neighbours
from hpcdist.errors import ConfigError
from hpcdist.records import Summary
from hpcdist.tools import console
from hpcdist.tools.compare import folder
from hpcdist.tools.compare.plan import (
    ComparedCell,
    PlannedRun,
    SweepDeclaration,
    file_name,
    higher_is_better,
    read_strategy,
)
from hpcdist.tools.compare.run_all import Runner, RunPlan
from hpcdist.tools.compare.table import mean_metric
from hpcdist.tools.runs import Run, is_done
from hpcdist.train.planning import rehearse
from hpcdist.train.runs import specify

ETA = 3  # halving goes on with one in so many, and gives it as many times the budget
RUNGS = 3  # at most: the first has 1/9 of the budget
_RANGE = re.compile(r"(?P<low>[^.:,]+(?:\.\d+)?(?:e-?\d+)?)\.\.(?P<high>[^:,]+)(?P<log>:log)?(?::(?P<points>\d+))?")


# --- points -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Axis:
    """The values of one setting: those listed, or all between two."""

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    points: int = 0
    whole: bool = False  # whole numbers only

    def draw(self, chance: random.Random) -> str:
        """Draw a value."""
        return chance.choice(self.values) if self.values else self._at(chance.random())

    def grid(self) -> tuple[str, ...]:
        """List the values of a grid.

        Raises:
            ConfigError: it is a range without a number of points.
        """
        if self.values:
            return self.values
        if self.points < 2:
            raise ConfigError(
                f"--over {self.key} must list values, or say how many of a range, for a grid; got a range. Write "
                f"{self.key}=LOW..HIGH:5, or leave out --grid."
            )
        return tuple(dict.fromkeys(self._at(i / (self.points - 1)) for i in range(self.points)))

    def _at(self, part: float) -> str:
        value = self.low * (self.high / self.low) ** part if self.log else self.low + (self.high - self.low) * part
        return str(round(value)) if self.whole else f"{value:.4g}"


def read_axis(text: str) -> Axis:
    """Read `KEY=A,B,C`, `KEY=LOW..HIGH`, `KEY=LOW..HIGH:log` or `KEY=LOW..HIGH:log:POINTS`.

    Raises:
        ConfigError: it is none of these.
    """
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--over must be KEY=A,B,C or KEY=LOW..HIGH[:log][:POINTS]; got {text!r}.")
    if ".." not in values:
        return Axis(key, tuple(value.strip() for value in values.split(",")))
    match = _RANGE.fullmatch(values)
    try:
        low, high = (float(match["low"]), float(match["high"])) if match else (1.0, 0.0)
    except ValueError:
        low, high = 1.0, 0.0
    if match is None or not low < high or (match["log"] and low <= 0):
        raise ConfigError(
            f"--over {key} must be LOW..HIGH with two numbers, of which the first is the smaller one, and above 0 with "
            f":log; got {values!r}."
        )
    whole = match["low"].isdigit() and match["high"].isdigit()
    return Axis(key, (), low, high, bool(match["log"]), int(match["points"] or 0), whole)


def points(declared: SweepDeclaration) -> list[tuple[str, ...]]:
    """List the points, each by its settings KEY=VALUE: random ones, or the whole grid."""
    axes = [read_axis(text) for text in declared.over]
    if declared.points:
        chance, drawn = random.Random(0), dict[tuple[str, ...], None]()
        for _ in range(100 * declared.points):  # there may be fewer different ones
            drawn[tuple(axis.draw(chance) for axis in axes)] = None
            if len(drawn) == declared.points:
                break
        found = list(drawn)
    else:
        found = list(itertools.product(*(axis.grid() for axis in axes)))
    return [tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)) for values in found]


# --- the sweep --------------------------------------------------------------------------------------------------------
class Sweep(RunPlan):
    """Make the runs of a sweep in one folder. Making it checks all points, and starts nothing.

    Attributes:
        cells: a cell for each point.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another sweep.
    """

    declared: SweepDeclaration
    command = "sweep"
    left_out = ()

    def __init__(self, declared: SweepDeclaration, output: Path):
        self.declared, self.output = declared, output
        self.title = f"{declared.job}: the best settings first"
        folder.require_same(output, declared)
        if declared.halving and not declared.budget.keys() & {"samples", "steps"}:
            raise ConfigError("--halving must have a --budget of samples or steps; got none. Add --budget samples=N.")
        name, options = read_strategy(declared.strategy)
        strategy = (f"strategy={name}", *(f"strategy.{option}" for option in options))
        job = Path(declared.job)
        with neighbours(job):
            metrics = specify(job, None, declared.settings)[0].metrics
            self.higher_is_better = higher_is_better(metrics, declared.metric)
            self.cells = [self._cell(job, strategy, point) for point in points(declared)]

    def _cell(self, job: Path, strategy: tuple[str, ...], point: tuple[str, ...]) -> ComparedCell:
        """Check a point, and make its cell."""
        declared = self.declared
        _, config = specify(job, None, (*declared.settings, *strategy, *point))
        rehearse(config, declared.ranks)
        cls = strategies.load(config.strategy.name)
        replicas = declared.ranks // config.parallel.stages
        workers = cls.Config.from_mapping(config.strategy.options, "strategy").workers(replicas)
        samples = len(workers) * config.batch_size * config.accumulation
        return ComparedCell(
            ", ".join(point), "strategy", declared.ranks, samples, (*strategy, *point), file_name("-".join(point))
        )

    # --- runs ---------------------------------------------------------------------------------------------------------
    def rungs(self) -> list[int]:
        """List by how much less than the budget the runs of each rung have; the last one has all of it."""
        if not self.declared.halving:
            return [1]
        most = int(math.log(max(1, len(self.cells)), ETA) + 1e-9)
        return [ETA**rung for rung in reversed(range(min(RUNGS, most + 1)))]

    def plan(self, cells: Sequence[ComparedCell], part: int = 1) -> list[PlannedRun]:
        """List the runs of cells with a part of the budget, in random order."""
        order = [self._run(cell, seed, part) for cell in cells for seed in range(self.declared.seeds)]
        random.Random(0).shuffle(order)
        return order

    def _run(self, cell: ComparedCell, seed: int, part: int) -> PlannedRun:
        declared = self.declared
        if not declared.halving:
            return cell.run(declared, seed)
        last = ETA ** (len(self.rungs()) - 1)
        steps = declared.budget.get("steps", declared.budget.get("samples", 0) / cell.samples)
        first = max(1, round(steps / last))  # of the first rung; so that each ends with a checkpoint
        whole = first * last // part
        run = cell.run(replace(declared, budget={**declared.budget, "steps": whole}), seed)
        saves = (f"checkpoint.every_steps={first}", "checkpoint.keep=1", "checkpoint.best=false")
        overrides = [setting for setting in run.overrides if not setting.startswith("budget.samples")]
        return replace(run, overrides=(*overrides, *saves), steps=whole)

    def make(self, runner: Runner) -> list[PlannedRun]:
        """Make all runs, rung by rung; return those that failed."""
        left = list(self.cells)
        failed: list[PlannedRun] = []
        rungs = self.rungs()
        points = sum(max(1, len(self.cells) // ETA**rung) for rung in range(len(rungs)))
        with runner.shown("runs", points * self.declared.seeds):
            for part in rungs:
                planned = self.plan(left, part)
                # Of halving, `comparison.json` has the runs that are still in it, because their budgets are equal.
                better = self.higher_is_better
                folder.write(self.output, self.declared, higher_is_better=better, cells=self.cells, runs=planned)
                failed += runner.run_all(planned)
                if part > 1:
                    left = sorted(left, key=self._merit)[: max(1, len(left) // ETA)]
        return failed

    # --- results ------------------------------------------------------------------------------------------------------
    def _summaries(self, cell: ComparedCell) -> list[Summary | None]:
        """Read the summaries of a cell's runs; None where a run has failed."""
        folders = [self.output / self._run(cell, seed, 1).folder for seed in range(self.declared.seeds)]
        return [Run(one).summary if is_done(one) else None for one in folders]

    def _merit(self, cell: ComparedCell) -> float:
        value = mean_metric(self._summaries(cell), self.declared.metric)
        return math.inf if value is None else -value if self.higher_is_better else value

    def show_table(self) -> None:
        """Show all points, the best first."""
        console.rows(self.title, self.table())

    def table(self) -> list[dict[str, Any]]:
        """Make a table of all points, the best first; of halving, those that went on first."""
        rows = []
        for cell in self.cells:
            settings = dict(setting.split("=", 1) for setting in cell.settings[-len(self.declared.over) :])
            found, metric = self._summaries(cell), self.declared.metric
            samples = 0 if found[0] is None else found[0].samples
            place = (-samples * self.declared.halving, self._merit(cell))
            rows.append((place, {**settings, "samples": samples, metric: mean_metric(found, metric)}))
        return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
