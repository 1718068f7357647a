"""Compare strategies on one job: check all of it first, then search learning rates, then make the runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from hpcdist.config import JobConfig, load, optimizers
from hpcdist.config.files import neighbours
from hpcdist.config.schedule import OWN_RATES
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.records import Summary, load_summary
from hpcdist.tools import baselines
from hpcdist.tools.compare import folder
from hpcdist.tools.compare.course import Watch, is_done, make_one
from hpcdist.tools.compare.making import Maker
from hpcdist.tools.compare.plan import ComparedCell, Declaration, PlannedRun, cells, possible, runs
from hpcdist.tools.tuning import FIRST_SEED, search_within
from hpcdist.train import Job
from hpcdist.train.data import make_data
from hpcdist.train.rehearsal import rehearse
from hpcdist.train.runs import specify


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
        return f"{self.name} on {self.ranks} rank{'s' * (self.ranks > 1)}: learning rate {self.rate:g}{edge}"


class Comparison:
    """Compare what a declaration names, in one folder. Making it checks all settings, and starts nothing.

    Args:
        output: the folder; one that holds this very comparison goes on with it.

    Attributes:
        left_out: sentences about what can't be run.

    Raises:
        ConfigError: a setting is wrong, as `hpcdist train` would find, or the folder holds another comparison.
    """

    def __init__(self, declared: Declaration, output: Path):
        self.declared, self.output = declared, output
        self._job_path = Path(declared.job)
        _require_whole(declared)
        folder.require_same(output, declared)
        with neighbours(self._job_path):
            self._job, self._config = specify(self._job_path, None, declared.settings)
            self.higher_is_better = higher_is_better(self._job, declared.metric)
            config = self._config
            every = cells(declared, config.batch_size, config.accumulation, config.parallel.stages)
            self.cells, self.left_out = possible(every, self._refusal)
        self._rate = _rate_of(self._config)
        if declared.tune and self._rate is None:
            raise ConfigError(
                f"--tune must be left out with {self._config.schedule.name or self._config.optimizer.name}, whose "
                "rates are not optimizer.lr; got it. Set its own options."
            )
        runs(declared, self.cells)  # raises where two have one folder

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

    # --- learning rates -----------------------------------------------------------------------------------------------
    def tune(self, makers: Mapping[str, Maker], watch: Watch) -> list[ChosenRate]:
        """Search the learning rate of each cell on seeds of its own; those that share one search it once.

        A folder that holds the runs of a search, or some of them, goes on with it.
        """
        if not self.declared.tune:
            return []
        firsts = {(cell.rate_key, cell.ranks): cell for cell in reversed(self.cells)}
        return [self._search(cell, makers, watch) for cell in reversed(firsts.values())]

    def _search(self, cell: ComparedCell, makers: Mapping[str, Maker], watch: Watch) -> ChosenRate:
        def measure(power: int, repeated: int) -> Summary | None:
            rate = self._rate * 2.0**power
            at_rate = replace(cell, stem=f"{cell.stem}-lr={rate:g}")
            run = at_rate.run(self.declared, FIRST_SEED + repeated, rate, "tuning")
            where = self.output / run.folder
            if not is_done(where) and make_one(run, self.output, makers, watch) is not None:
                return None
            return load_summary(where)

        best, known = search_within(self.declared.tune, measure, self._merit)
        means = {self._rate * 2.0**power: _mean(found, self.declared.metric) for power, found in known.items()}
        between = best - 1 in known and best + 1 in known
        return ChosenRate(cell.rate_key, cell.ranks, self._rate * 2.0**best, means, between)

    def _merit(self, found: Sequence[Summary | None]) -> tuple[float, float]:
        """Judge a rate by the metric, and where that is equal by the loss: the less the better."""
        metric, loss = _mean(found, self.declared.metric), _mean(found, "loss")
        if metric is None or loss is None:
            return math.inf, math.inf
        return -metric if self.higher_is_better else metric, loss

    # --- runs ---------------------------------------------------------------------------------------------------------
    def runs(self, chosen: Sequence[ChosenRate] = ()) -> list[PlannedRun]:
        """List the runs, with the user's rates and those that were chosen."""
        rates = {(key, ranks): rate for key, rate in self.declared.rates.items() for ranks in self.declared.ranks}
        rates |= {(one.name, one.ranks): one.rate for one in chosen}
        return runs(self.declared, self.cells, rates)

    def plan(self, chosen: Sequence[ChosenRate] = ()) -> list[PlannedRun]:
        """List the runs, and write `comparison.json`."""
        planned = self.runs(chosen)
        tuning = {"runs": self.declared.tune, "first_seed": FIRST_SEED, "chosen": [asdict(one) for one in chosen]}
        folder.write(
            self.output,
            self.declared,
            higher_is_better=self.higher_is_better,
            cells=self.cells,
            runs=planned,
            left_out=self.left_out,
            tuning=tuning if self.declared.tune else None,
        )
        return planned

    def make_data(self) -> None:
        """Make the job's data file if it isn't there, which runs side by side can't share."""
        with neighbours(self._job_path):
            make_data(self._job, Path(self._config.data.path))


def _require_whole(declared: Declaration) -> None:
    """Check that a declaration's parts fit together."""
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


def higher_is_better(job: Job, metric: str) -> bool:
    """Tell whether more of a job's metric is better; raise UnknownNameError where it has none of that name."""
    if metric == "loss":
        return False
    if metric not in job.metrics:
        raise UnknownNameError("metric", metric, [*job.metrics, "loss"])
    return job.metrics[metric].higher_is_better


def _rate_of(config: JobConfig) -> float | None:
    """Return the learning rate that a search begins at; None where `optimizer.lr` has no effect."""
    if config.schedule.name in OWN_RATES:
        return None
    default = inspect.signature(optimizers()[config.optimizer.name]).parameters["lr"].default
    rate = default if config.optimizer.lr is None else config.optimizer.lr
    return float(rate) if isinstance(rate, (int, float)) and rate > 0 else None


def _mean(found: Sequence[Summary | None], metric: str) -> float | None:
    """Average a metric over runs; None where one failed, or ended with a NaN."""
    values = [math.nan if one is None else one.metrics[metric] for one in found]
    return fmean(values) if all(map(math.isfinite, values)) else None
