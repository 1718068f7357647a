"""Run a comparison: check all settings, search learning rates if asked, then run what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pandas import DataFrame

from hpcdist.config.merge import load
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.records import Summary, load_summary
from hpcdist.registry import catalogue
from hpcdist.tools import console, report
from hpcdist.tools.compare.experiment import Comparison
from hpcdist.tools.compare.folder import require_same, write
from hpcdist.tools.compare.plan import ComparedGroup, PlannedRun, mean_metric, plan
from hpcdist.tools.compare.run_all import ExperimentRuns, Runner, missing
from hpcdist.tools.compare.trained import is_plain
from hpcdist.tools.report.analysis import Analysis, analyse
from hpcdist.tools.report.page import sections_of
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.report.table import csv_rows, show, tables
from hpcdist.tools.report.verdict import judge
from hpcdist.tools.statistics import MIN_SEEDS

T = TypeVar("T")
FIRST_SEED = 1000  # of the search for learning rates, apart from the seeds of results


@dataclass(frozen=True)
class ChosenRate:
    """A learning rate that the search has chosen for a group.

    Attributes:
        name: the group's `rate_key`.
        tried: mean of the metric by learning rate; None: a run failed.
        between: half and twice the rate were tried, and both are worse.
    """

    name: str
    ranks: int
    rate: float
    tried: dict[float, float | None]
    between: bool

    def __str__(self) -> str:
        edge = "" if self.between else ", though a neighbour was not tried: give --tune more runs"
        return f"{self.name} on {console.count(self.ranks, 'rank')}: learning rate {self.rate:g}{edge}"


class ComparedRuns(ExperimentRuns):
    """The runs of a comparison; see `ExperimentRuns`. The constructor checks all settings and starts nothing.

    Args:
        folder: of all files. A comparison with the same settings there is resumed.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another comparison.
    """

    experiment: Comparison

    def __init__(self, experiment: Comparison, folder: Path):
        _check_options(experiment)
        super().__init__(experiment, folder)
        runnable, out = self._split_runnable(self.trained.groups)
        self.skipped = [*out, *self.trained.unknown]
        self.groups = self._share_runs(runnable)
        self._plan_runs(())
        require_same(folder, experiment)  # last: the error should name a wrong setting first

    def _split_runnable(self, groups: Sequence[ComparedGroup]) -> tuple[list[ComparedGroup], list[str]]:
        """Return the groups that can run, and for each other group a sentence that says why it can't."""
        first_runs = [group.run(self.experiment, seed=0) for group in groups]
        reasons = list(zip(groups, map(self.trained.refusal, first_runs)))
        runnable = [group for group, reason in reasons if reason is None]
        for group, reason in reasons:
            if group.kind == "strategy" and group.name not in {other.name for other in runnable}:
                raise ConfigError(f"{group.name} must be able to run on one of the numbers of ranks; got: {reason}")
        left_out = [(group.name, console.count(group.ranks, "rank"), why) for group, why in reasons if why is not None]
        return runnable, [f"{name} is left out on {ranks}: {why}" for name, ranks, why in left_out]

    def _share_runs(self, runnable: Sequence[ComparedGroup]) -> list[ComparedGroup]:
        """Return the groups; on one rank strategies that equal the plain optimizer share the runs of the first."""
        first_by_rate: dict[float | None, ComparedGroup] = {}  # by the user's learning rate
        shared, sharing = [], []
        for group in runnable:
            if group.kind == "strategy" and group.ranks == 1 and not self.trained.reads_strategy and is_plain(group):
                first = first_by_rate.setdefault(self.experiment.rates.get(group.rate_key), group)
                sharing += [group.name] * (group is not first)
                group = replace(first, name=group.name)  # all else of the first, such as its folders
            shared.append(group)
        if sharing:
            names = ", ".join([*(first.name for first in first_by_rate.values()), *sharing])
            self.skipped = [*self.skipped, f"on one rank {names} all take the optimiser's steps, and share runs"]
        return shared

    def _plan_runs(self, chosen: Sequence[ChosenRate]) -> None:
        """Set `plan` to all runs, with the learning rates that the user (`--rate`) or the search (`chosen`) gives."""
        self._chosen, experiment = chosen, self.experiment
        rates = {(key, ranks): rate for key, rate in experiment.rates.items() for ranks in experiment.ranks}
        rates |= {(choice.name, choice.ranks): choice.rate for choice in chosen}
        self.plan = plan(experiment, self.groups, rates)

    # --- runs ---------------------------------------------------------------------------------------------------------
    def run(self, runner: Runner) -> list[PlannedRun]:
        """Search learning rates if asked, then run everything that is missing; return the failed runs."""
        self.write()
        if (seeds := self.experiment.seeds) < MIN_SEEDS:
            warning = f"With {console.count(seeds, 'seed')} differences in results can't be told from noise"
            console.note(f"{warning}; that takes {MIN_SEEDS} seeds or more")
        if self.experiment.tune:
            self.tune(runner)
        remaining = missing(self.plan, self.folder)
        if len(remaining) < (total := len({run.folder for run in self.plan})):  # groups may share a run
            console.note(f"{total - len(remaining)} of {total} runs are there already")
        with runner.display("runs", len(remaining)):
            return runner.run_all(remaining)

    def write(self) -> None:
        tune, chosen = self.experiment.tune, [asdict(rate) for rate in self._chosen]
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
        """Search a learning rate per `rate_key` and number of ranks, with separate seeds; then plan all runs."""
        # The first group of each key represents it; reversed twice, since the last assignment to a key remains.
        firsts = {(group.rate_key, group.ranks): group for group in reversed(self.groups)}
        with runner.display("learning rates", len(firsts) * self.experiment.tune):
            self._plan_runs([self._search(group, runner) for group in reversed(firsts.values())])
        for choice in self._chosen:
            print(choice)
        self.write()
        return self._chosen

    def _search(self, group: ComparedGroup, runner: Runner) -> ChosenRate:
        """Search the learning rate of one group among the job's rate times 2^power, for integers `power`."""
        start_rate = self.trained.first_rate or 0.0  # None is refused with --tune

        def measure(power: int, repeated: int) -> Summary | None:  # None: the run failed
            rate = start_rate * 2.0**power
            at_rate = replace(group, stem=f"{group.stem}-lr={rate:g}")
            run = at_rate.run(self.experiment, FIRST_SEED + repeated, rate, "tuning")
            return None if runner.run_all([run]) else load_summary(self.folder / run.folder)

        best_power, measured = search_within(self.experiment.tune, measure, self._rate_sort_key)
        means = {start_rate * 2.0**power: mean_metric(runs, self.experiment.metric) for power, runs in measured.items()}
        between = best_power - 1 in measured and best_power + 1 in measured
        return ChosenRate(group.rate_key, group.ranks, start_rate * 2.0**best_power, means, between)

    def _rate_sort_key(self, summaries: Sequence[Summary | None]) -> tuple[float, float]:
        """Return the sort key of a rate from its runs, lower is better: mean metric, mean loss; inf if a run failed."""
        metric, loss = mean_metric(summaries, self.experiment.metric), mean_metric(summaries, "loss")
        if metric is None or loss is None:
            return math.inf, math.inf
        return -metric if self.higher_is_better else metric, loss

    # --- results ------------------------------------------------------------------------------------------------------
    def show_table(self) -> None:
        show(tables([analyse(job) for job in read_jobs([self.folder])]))

    @cached_property
    def table(self) -> DataFrame:
        """Return a row per group, with the columns of `hpcdist report --csv`."""
        return DataFrame(csv_rows(tables([self._analysis])))

    @cached_property
    def runs(self) -> DataFrame:
        """Return a row per run, as `hpcdist.read_runs` does."""
        return report.read_runs(self.folder)

    @cached_property
    def verdict(self) -> str:
        """Return the report's conclusion, in a sentence or two."""
        return judge(self._analysis).headline

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the report's matplotlib figures by name."""
        figure_lists = [figures for section in sections_of(self._analysis) for figures in section.figures.values()]
        return {drawn.name: drawn.figure for figures in figure_lists for drawn in figures}

    @cached_property
    def _analysis(self) -> Analysis:
        (job,) = read_jobs([self.folder])
        return analyse(job)


def search_within(
    runs: int, measure: Callable[[int, int], T], merit: Callable[[Sequence[T]], Any]
) -> tuple[int, dict[int, list[T]]]:
    """Minimize `merit` over the integers by a local search with `runs` measurements.

    The search starts at 0 and moves to the better neighbour until both neighbours are worse. The remaining runs repeat
    the best number and its neighbours, to reduce noise.

    Args:
        measure: called with a number and how often it was measured before.
        merit: sort key of all measurements of a number; lower is better.

    Returns:
        The best number, and all measurements by number.
    """
    measured: dict[int, list[T]] = {}

    def best() -> int:
        return min(measured, key=lambda number: merit(measured[number]))

    for _ in range(runs):
        center = best() if measured else 0
        candidates = (center, center - 1, center + 1)
        new = [number for number in candidates if number not in measured]  # else repeat the least measured
        number = new[0] if new else min(candidates, key=lambda n: (len(measured[n]), merit(measured[n])))
        measured.setdefault(number, []).append(measure(number, len(measured.get(number, ()))))
    return best(), measured


# --- checks -----------------------------------------------------------------------------------------------------------
def _check_options(experiment: Comparison) -> None:
    """Raise ConfigError for options that contradict each other, and for unknown names of baselines and strategies."""
    for key in ("strategy", "seed"):
        if key in load({}, None, experiment.settings):
            option = "--strategies NAME:KEY=VALUE" if key == "strategy" else "--seeds"
            raise ConfigError(f"--set and --config must leave {key} to {option}; got it there. Remove it.")
    for baseline in experiment.baselines:
        catalogue("baselines").find(baseline)  # raises UnknownNameError
    names = [*experiment.strategies, *experiment.baselines]
    for name in experiment.rates:
        if name not in names:
            raise UnknownNameError("--rate", name, names)
    if experiment.rates and experiment.tune:
        raise ConfigError("--rate must be omitted with --tune, which chooses all rates; got both. Take one of the two.")
