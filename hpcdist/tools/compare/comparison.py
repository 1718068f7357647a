"""Compare strategies on one job: check all of it first, then search learning rates, then make the runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.config import JobConfig, load, optimizers
from hpcdist.config.files import neighbours
from hpcdist.config.optimizer import OWN_RATES
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.records import Summary, load_summary
from hpcdist.tools import baselines, console
from hpcdist.tools.compare import folder
from hpcdist.tools.compare.plan import ComparedCell, Declaration, PlannedRun, cells, mean_metric, runs
from hpcdist.tools.compare.run_all import Runner, RunPlan, missing
from hpcdist.tools.report import table
from hpcdist.tools.report.analysis import analyse
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.report.wording import count
from hpcdist.train.planning import rehearse
from hpcdist.train.runs import specify

T = TypeVar("T")
FIRST_SEED = 1000  # of those that rates are chosen on: no result may come from them


@dataclass(frozen=True)
class ChosenRate:
    """The learning rate that a cell's search has chosen.

    Attributes:
        tried: the metric's mean by rate, None where a run failed.
        between: whether both neighbours, half and twice the rate, were tried and are worse.
    """

    name: str
    ranks: int
    rate: float
    tried: dict[float, float | None]
    between: bool

    def __str__(self) -> str:
        edge = "" if self.between else ", though a neighbour was not tried: give --tune more runs"
        return f"{self.name} on {count(self.ranks, 'rank')}: learning rate {self.rate:g}{edge}"


class Comparison(RunPlan):
    """Compare what a declaration names, in one folder. Making it checks all settings, and starts nothing.

    Args:
        output: the folder; one that holds this very comparison goes on with it.

    Attributes:
        left_out: sentences about what can't be run.

    Raises:
        ConfigError: a setting is wrong, as `hpcdist train` would find, or the folder holds another comparison.
    """

    declared: Declaration

    def __init__(self, declared: Declaration, output: Path):
        self.declared, self.output = declared, output
        self.command = "compare" if declared.virtual is None else "simulate"
        _require_whole(declared)
        self._specify()
        config = self._config
        with neighbours(self._job_path):
            every = cells(declared, config.batch_size, config.accumulation, config.parallel.stages)
            self.cells, self.left_out = self._possible(every)
        self._first_rate = _first_rate(self._config)
        if declared.tune and self._first_rate is None:
            raise ConfigError(
                f"--tune must be left out with {config.schedule.name or config.optimizer.name}, whose rates are not "
                "optimizer.lr; got it. Set its own options."
            )
        folder.require_same(output, declared)  # after the settings, as a wrong one should be named first
        self._chosen: list[ChosenRate] = []
        self._runs = self._plan()

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, at the rates that the user or a search has chosen."""
        return self._runs

    def _possible(self, every: Sequence[ComparedCell]) -> tuple[list[ComparedCell], list[str]]:
        """Divide cells into those that can run, and a sentence for each of the others.

        Raises:
            ConfigError: a setting is wrong, or a strategy is left out on every number of ranks.
        """
        reasons = [(cell, self._refusal(cell)) for cell in every]
        kept = [cell for cell, reason in reasons if reason is None]
        for cell, reason in reasons:
            if cell.kind == "strategy" and cell.name not in {other.name for other in kept}:
                raise ConfigError(f"{cell.name} must be able to run on one of the numbers of ranks; got: {reason}")
        left_out = [(f"{cell.name} is left out on {count(cell.ranks, 'rank')}", why) for cell, why in reasons if why]
        return kept, [f"{which}: {why}" for which, why in left_out]

    def _refusal(self, cell: ComparedCell) -> str | None:
        """Check a cell's settings, which are wrong on any number of ranks; return why it can't run on its own."""
        _, config = specify(self._job_path, None, cell.run(self.declared, seed=0).overrides)
        if cell.kind == "baseline":
            if not config.parallel.whole:
                return "its ranks hold whole models, and parallel.stages is more than 1."
            return baselines.load(cell.name).why_not()
        try:
            rehearse(config, cell.ranks)
        except ConfigError as error:
            return str(error)
        return None

    def _plan(self) -> list[PlannedRun]:
        rates = {(key, ranks): rate for key, rate in self.declared.rates.items() for ranks in self.declared.ranks}
        rates |= {(one.name, one.ranks): one.rate for one in self._chosen}
        return runs(self.declared, self.cells, rates)

    # --- what the runs are made by ------------------------------------------------------------------------------------
    def make(self, runner: Runner) -> list[PlannedRun]:
        """Search the rates that are to be searched, then make all runs that are missing; return those that failed."""
        self.write()
        if self.declared.tune:
            self.tune(runner)
        left = missing(self.runs, self.output)
        if len(left) < len(self.runs):
            console.note(f"{len(self.runs) - len(left)} of {len(self.runs)} runs are there already")
        with runner.shown("runs", len(left)):
            return runner.run_all(self.runs)

    def write(self) -> None:
        """Write `comparison.json`."""
        chosen = [asdict(one) for one in self._chosen]
        folder.write(
            self.output,
            self.declared,
            higher_is_better=self.higher_is_better,
            cells=self.cells,
            runs=self.runs,
            left_out=self.left_out,
            tuning={"runs": tune, "first_seed": FIRST_SEED, "chosen": chosen} if (tune := self.declared.tune) else None,
        )

    def show_table(self) -> None:
        """Show the report's table, a row for each cell."""
        table.show(table.tables([analyse(job) for job in read_jobs([self.output])]))

    # --- learning rates -----------------------------------------------------------------------------------------------
    def tune(self, runner: Runner) -> list[ChosenRate]:
        """Search the learning rate of each cell on seeds of its own; those that share one search it once.

        A folder that holds the runs of a search, or some of them, goes on with it.
        """
        firsts = {(cell.rate_key, cell.ranks): cell for cell in reversed(self.cells)}
        with runner.shown("learning rates", len(firsts) * self.declared.tune):
            self._chosen = [self._search(cell, runner) for cell in reversed(firsts.values())]
        for one in self._chosen:
            print(one)
        self._runs = self._plan()
        self.write()
        return self._chosen

    def _search(self, cell: ComparedCell, runner: Runner) -> ChosenRate:
        first = self._first_rate or 0.0

        def measure(power: int, repeated: int) -> Summary | None:
            rate = first * 2.0**power
            at_rate = replace(cell, stem=f"{cell.stem}-lr={rate:g}")
            run = at_rate.run(self.declared, FIRST_SEED + repeated, rate, "tuning")
            return None if runner.run_all([run]) else load_summary(self.output / run.folder)

        best, known = search_within(self.declared.tune, measure, self._merit)
        means = {first * 2.0**power: mean_metric(found, self.declared.metric) for power, found in known.items()}
        between = best - 1 in known and best + 1 in known
        return ChosenRate(cell.rate_key, cell.ranks, first * 2.0**best, means, between)

    def _merit(self, found: Sequence[Summary | None]) -> tuple[float, float]:
        """Judge a rate by the metric, and where that is equal by the loss: the less the better."""
        metric, loss = mean_metric(found, self.declared.metric), mean_metric(found, "loss")
        if metric is None or loss is None:
            return math.inf, math.inf
        return -metric if self.higher_is_better else metric, loss


def search_within(
    runs: int, measure: Callable[[int, int], T], merit: Callable[[Sequence[T]], Any]
) -> tuple[int, dict[int, list[T]]]:
    """Search for the whole number with the least merit in so many runs; return it and what was measured.

    It begins at 0 and goes to where neighbours are better, each measured once. The runs that are left repeat the
    best one and its neighbours, so that luck counts for less.

    Args:
        measure: called with a number and how often that was measured before.
        merit: of all that was measured of a number.
    """
    known: dict[int, list[T]] = {}

    def best() -> int:
        return min(known, key=lambda number: merit(known[number]))

    for _ in range(runs):
        around = best() if known else 0
        near = (around, around - 1, around + 1)
        unknown = [number for number in near if number not in known]
        number = unknown[0] if unknown else min(near, key=lambda near: (len(known[near]), merit(known[near])))
        known.setdefault(number, []).append(measure(number, len(known.get(number, ()))))
    return best(), known


# --- checks -----------------------------------------------------------------------------------------------------------
def _require_whole(declared: Declaration) -> None:
    for key in ("strategy", "seed"):
        if key in load({}, None, declared.settings):
            option = "--strategies NAME:KEY=VALUE" if key == "strategy" else "--seeds"
            raise ConfigError(f"--set and --config must leave {key} to {option}; got it there. Remove it.")
    for baseline in declared.baselines:
        if baseline not in baselines.available():
            raise UnknownNameError("--baselines", baseline, baselines.available())
    named = [*declared.strategies, *declared.baselines]
    for name in declared.rates:
        if name not in named:
            raise UnknownNameError("--rate", name, named)
    if declared.rates and declared.tune:
        raise ConfigError(
            "--rate must be left out with --tune, which chooses all rates; got both. Take one of the two."
        )


def _first_rate(config: JobConfig) -> float | None:
    """Return the learning rate that a search begins at; None where `optimizer.lr` has no effect."""
    if config.schedule.name in OWN_RATES:
        return None
    default = inspect.signature(optimizers()[config.optimizer.name]).parameters["lr"].default
    rate = default if config.optimizer.lr is None else config.optimizer.lr
    return float(rate) if isinstance(rate, (int, float)) and rate > 0 else None
