"""The runs of a comparison: all of it is checked first, then learning rates are searched, then the runs are made."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from pandas import DataFrame

from hpcdist.config import load
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.records import Summary, load_summary
from hpcdist.tools import baselines, console, report
from hpcdist.tools.compare.experiment import Comparison
from hpcdist.tools.compare.folder import require_same, write
from hpcdist.tools.compare.plan import ComparedGroup, PlannedRun, mean_metric, plan
from hpcdist.tools.compare.run_all import MadeRuns, Runner, missing
from hpcdist.tools.report.analysis import Analysis, analyse
from hpcdist.tools.report.page import sections_of
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.report.table import show, tables, write_csv
from hpcdist.tools.report.verdict import judge
from hpcdist.tools.report.wording import count
from hpcdist.tools.statistics import LEAST_SEEDS

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


class ComparedRuns(MadeRuns):
    """The runs of a comparison; see `MadeRuns`. Constructing it checks all settings, and starts nothing.

    Args:
        folder: of all files. Where it holds the same comparison, that comparison goes on.

    Raises:
        ConfigError: a setting is wrong, as `hpcdist train` would find, or the folder holds another comparison.
    """

    experiment: Comparison

    def __init__(self, experiment: Comparison, folder: Path):
        _require_whole(experiment)
        super().__init__(experiment, folder)
        kept, out = self._possible(self.trained.groups)
        self.skipped = [*out, *self.trained.unknown]
        self.groups = self._sharing(kept)
        self._choose(())
        require_same(folder, experiment)  # after the settings, as a wrong one should be named first

    def _possible(self, every: Sequence[ComparedGroup]) -> tuple[list[ComparedGroup], list[str]]:
        """Divide cells into those that can run, and a sentence for each of the others.

        Raises:
            ConfigError: a setting is wrong, or a strategy is left out on every number of ranks.
        """
        firsts = [group.run(self.experiment, seed=0) for group in every]
        reasons = [(group, self.trained.refusal(run)) for group, run in zip(every, firsts, strict=True)]
        kept = [group for group, reason in reasons if reason is None]
        for group, reason in reasons:
            if group.kind == "strategy" and group.name not in {other.name for other in kept}:
                raise ConfigError(f"{group.name} must be able to run on one of the numbers of ranks; got: {reason}")
        skipped = [(f"{group.name} is left out on {count(group.ranks, 'rank')}", why) for group, why in reasons if why]
        return kept, [f"{which}: {why}" for which, why in skipped]

    def _sharing(self, kept: Sequence[ComparedGroup]) -> list[ComparedGroup]:
        """Let strategies that do the same on one rank, the plain optimiser's steps, share the runs of the first one."""
        firsts: dict[float | None, ComparedGroup] = {}  # by the learning rate that the user has given
        found, alike = [], []
        for group in kept:
            if group.kind == "strategy" and group.ranks == 1 and self.trained.is_plain(group):
                first = firsts.setdefault(self.experiment.rates.get(group.rate_key), group)
                alike += [group.name] * (group is not first)
                group = replace(first, name=group.name)
            found.append(group)
        if alike:
            told = ", ".join([*(first.name for first in firsts.values()), *alike])
            self.skipped = [
                *self.skipped,
                f"on one rank {told} all take the optimiser's own steps, in runs that they share",
            ]
        return found

    def _choose(self, chosen: Sequence[ChosenRate]) -> None:
        """Plan all runs, at the rates that the user or a search has chosen."""
        self._chosen, experiment = chosen, self.experiment
        rates = {(key, ranks): rate for key, rate in experiment.rates.items() for ranks in experiment.ranks}
        rates |= {(one.name, one.ranks): one.rate for one in chosen}
        self.plan = plan(experiment, self.groups, rates)

    # --- what the runs are made by ------------------------------------------------------------------------------------
    def run(self, runner: Runner) -> list[PlannedRun]:
        """Search the rates that are to be searched, then make all runs that are missing; return those that failed."""
        self.write()
        if (seeds := self.experiment.seeds) < LEAST_SEEDS:
            told = f"With {count(seeds, 'seed')} differences in results can't be told from noise"
            console.note(f"{told}; that takes --seeds {LEAST_SEEDS} or more")
        if self.experiment.tune:
            self.tune(runner)
        left = missing(self.plan, self.folder)
        if len(left) < (total := len({run.folder for run in self.plan})):
            console.note(f"{total - len(left)} of {total} runs are there already")
        with runner.shown("runs", len(left)):
            return runner.run_all(left)

    def write(self) -> None:
        """Write `comparison.json`."""
        tune, chosen = self.experiment.tune, [asdict(one) for one in self._chosen]
        write(
            self.folder,
            self.experiment,
            higher_is_better=self.higher_is_better,
            groups=self.groups,
            runs=self.plan,
            skipped=self.skipped,
            tuning={"runs": tune, "first_seed": FIRST_SEED, "chosen": chosen} if tune else None,
        )

    # --- learning rates -----------------------------------------------------------------------------------------------
    def tune(self, runner: Runner) -> Sequence[ChosenRate]:
        """Search the learning rate of each cell on seeds of its own; those that share one search it once.

        A folder that holds the runs of a search, or some of them, goes on with it.
        """
        firsts = {(group.rate_key, group.ranks): group for group in reversed(self.groups)}
        with runner.shown("learning rates", len(firsts) * self.experiment.tune):
            self._choose([self._search(group, runner) for group in reversed(firsts.values())])
        for one in self._chosen:
            print(one)
        self.write()
        return self._chosen

    def _search(self, group: ComparedGroup, runner: Runner) -> ChosenRate:
        first = self.trained.first_rate or 0.0

        def measure(power: int, repeated: int) -> Summary | None:
            rate = first * 2.0**power
            at_rate = replace(group, stem=f"{group.stem}-lr={rate:g}")
            run = at_rate.run(self.experiment, FIRST_SEED + repeated, rate, "tuning")
            return None if runner.run_all([run]) else load_summary(self.folder / run.folder)

        best, known = search_within(self.experiment.tune, measure, self._merit)
        means = {first * 2.0**power: mean_metric(found, self.experiment.metric) for power, found in known.items()}
        between = best - 1 in known and best + 1 in known
        return ChosenRate(group.rate_key, group.ranks, first * 2.0**best, means, between)

    def _merit(self, found: Sequence[Summary | None]) -> tuple[float, float]:
        """Judge a rate by the metric, and where that is equal by the loss: the less the better."""
        metric, loss = mean_metric(found, self.experiment.metric), mean_metric(found, "loss")
        if metric is None or loss is None:
            return math.inf, math.inf
        return -metric if self.higher_is_better else metric, loss

    # --- results ------------------------------------------------------------------------------------------------------
    def show_table(self) -> None:
        """Show the report's table, a row for each cell."""
        show(tables([analyse(job) for job in read_jobs([self.folder])]))

    @cached_property
    def table(self) -> DataFrame:
        """Return a row for each kind of run, with the columns of `hpcdist report --csv`."""
        text = io.StringIO()
        write_csv(tables([self._analysis]), text)
        return pd.read_csv(io.StringIO(text.getvalue()))

    @cached_property
    def runs(self) -> DataFrame:
        """Return a row for each run, as `hpcdist.read_runs` does."""
        return report.read_runs(self.folder)

    @cached_property
    def verdict(self) -> str:
        """Return the answer of the report, in a sentence or two."""
        return judge(self._analysis).headline

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the report's figures, matplotlib's, by their names."""
        found = [drawn for section in sections_of(self._analysis) for of in section.figures.values() for drawn in of]
        return {drawn.name: drawn.figure for drawn in found}

    @cached_property
    def _analysis(self) -> Analysis:
        (job,) = read_jobs([self.folder])
        return analyse(job)


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
def _require_whole(experiment: Comparison) -> None:
    for key in ("strategy", "seed"):
        if key in load({}, None, experiment.settings):
            option = "--strategies NAME:KEY=VALUE" if key == "strategy" else "--seeds"
            raise ConfigError(f"--set and --config must leave {key} to {option}; got it there. Remove it.")
    for baseline in experiment.baselines:
        if baseline not in baselines.available():
            raise UnknownNameError("--baselines", baseline, baselines.available())
    named = [*experiment.strategies, *experiment.baselines]
    for name in experiment.rates:
        if name not in named:
            raise UnknownNameError("--rate", name, named)
    if experiment.rates and experiment.tune:
        raise ConfigError("--rate must be omitted with --tune, which chooses all rates; got both. Take one of the two.")
