"""What an experiment trains: a job, or a script with its own training loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist import strategies
from hpcdist.config import JobConfig, load, optimizers
from hpcdist.config.files import neighbours
from hpcdist.config.optimizer import OWN_RATES
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.tools import baselines
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.plan import ComparedGroup, PlannedRun, groups
from hpcdist.tools.compare.script import OF_EVERY_RUN, asks_for
from hpcdist.tools.compare.space import read_axis
from hpcdist.tools.report.results import is_higher_better
from hpcdist.train.job import prepare_data
from hpcdist.train.planning import rehearse
from hpcdist.train.runs import specify


class TrainedJob:
    """A job's file.

    Attributes:
        groups: see `plan.cells`.
        higher_is_better: more of the experiment's metric.
        first_rate: at which a search for learning rates begins; None where the experiment has no say in rates.
        evaluations: of a run, the last one included; 0 where they are not known.
        unknown: sentences about what is left out because nobody knows it.
    """

    unknown: Sequence[str] = ()

    def __init__(self, experiment: Comparison | Sweep):
        self._path = Path(experiment.job)
        with neighbours(self._path):
            self._job, self.config = specify(self._path, None, experiment.settings)
        self.higher_is_better = higher_is_better(self._job.metrics, experiment.metric)
        self.first_rate = _first_rate(self.config)
        self.evaluations = _count_evaluations(self.config, experiment)
        if isinstance(experiment, Comparison) and experiment.tune and self.first_rate is None:
            raise ConfigError(
                f"--tune must be omitted with {self.config.schedule.name or self.config.optimizer.name}, whose rates "
                "are not optimizer.lr; got it. Set its own options."
            )
        config = self.config
        self.groups = groups(experiment, config.batch_size, config.accumulation, config.parallel.stages)

    def refusal(self, run: PlannedRun) -> str | None:
        """Check a run's settings, which are wrong on any number of ranks; return why it can't run on its own."""
        with neighbours(self._path):
            _, config = specify(self._path, None, run.overrides)
            if run.kind == "baseline":
                if not config.parallel.whole:
                    return "its ranks hold whole models, and parallel.stages is more than 1."
                return baselines.load(run.name).why_not()
            return _rehearsed(config, run.ranks)

    def is_plain(self, group: ComparedGroup) -> bool:
        """Tell whether a cell's strategy takes the optimiser's own steps on one rank, and nothing else differs."""
        return _is_plain(group)

    def make_data(self) -> None:
        """Make the job's data file if it isn't there, because runs side by side can't share that."""
        with neighbours(self._path):
            prepare_data(self._job, self.config)


class TrainedScript:
    """A script or a function with its own training loop, which alone knows its batch and its rates; see `TrainedJob`.

    Raises:
        ConfigError: an option is for jobs, or the script can't be given what differs between its runs.
    """

    first_rate: float | None = None
    evaluations = 0

    def __init__(self, experiment: Comparison | Sweep):
        self._experiment, controls = experiment, isinstance(experiment, Comparison) and experiment.controls
        self.higher_is_better = is_higher_better(experiment.metric)
        options = {"set": "settings", "budget": "budget", "tune": "tune", "rate": "rates", "baselines": "baselines"}
        for option, name in options.items():
            if value := getattr(experiment, name, None):
                raise ConfigError(
                    f"--{option} must be omitted with a script, which is no job; got {value}. Give the script what it "
                    "needs behind --."
                )
        if isinstance(experiment, Sweep) and (experiment.pruner != "none" or not experiment.metric):
            raise ConfigError(
                "--target must be given, and --pruner left out, to sweep over a script, which says no metric before it "
                f"runs; got {experiment.metric or 'no target'}, {experiment.pruner}. Write --target loss=0.1, say."
            )
        self._asked = asks_for(experiment.job, experiment.arguments or ())
        self._require_given(self._asked)
        skipped = ", and there are no serial controls" * controls
        self.groups = groups(experiment)
        self.unknown = [f"{experiment.job} alone knows its batch and when it ends: runs are not cut{skipped}"]

    def _require_given(self, asked: set[str]) -> None:
        """Raise ConfigError where the script asks for what no run has, or does not ask for what differs in runs."""
        experiment, by_name = self._experiment, ".py:" in self._experiment.job
        where = "the function's parameters" if by_name else "the {NAME} in ARGS"
        swept = [read_axis(text).key for text in experiment.over] if isinstance(experiment, Sweep) else []
        differing = [*(key for key in swept if key.partition(".")[0] != "strategy"), *["seed"] * (experiment.seeds > 1)]
        told = ", ".join(sorted(asked)) or "none"
        if lacking := [name for name in differing if name not in asked]:
            raise ConfigError(
                f"{where} must include {lacking[0]}, without which all runs would be the same one; got {told}. Write "
                f"-- --{lacking[0]} {{{lacking[0]}}}{', or give --seeds 1' * (lacking[0] == 'seed')}."
            )
        if not by_name and not asked <= {*OF_EVERY_RUN, *swept}:
            raise ConfigError(f"{where} must be of {', '.join([*OF_EVERY_RUN, *swept])}; got {told}. Leave others out.")

    def refusal(self, run: PlannedRun) -> str | None:
        """Check the options of a run's strategy; see `TrainedJob`."""
        settings = [text for text in run.overrides if text.startswith("strategy")]
        return _rehearsed(JobConfig.from_mapping(load({}, None, settings)), run.ranks)

    def is_plain(self, group: ComparedGroup) -> bool:
        """See `TrainedJob`; a script that is told its strategy may do anything with it."""
        return _is_plain(group) and "strategy" not in self._asked

    def make_data(self) -> None:
        """Do nothing: the script makes its data."""


def _rehearsed(config: JobConfig, ranks: int) -> str | None:
    try:
        rehearse(config, ranks)
    except UnknownNameError:  # on any number of ranks
        raise
    except ConfigError as error:
        return str(error)
    return None


def _is_plain(group: ComparedGroup) -> bool:
    options = load({}, None, group.settings)["strategy"]
    name = options if isinstance(options, str) else options["name"]
    cls = strategies.load(name)
    ours = cls.__module__.startswith("hpcdist.strategies.")  # whose tests say so
    own_rule = cls.contract.step == "the strategy's" or cls.contract.batch == "portions"
    return ours and not own_rule and not {"on_nonfinite", "provider"} & set(options)


def higher_is_better(metrics: Mapping[str, Any], metric: str) -> bool:
    """Tell whether more of a job's metric is better; raise UnknownNameError where it has none of that name."""
    if metric == "loss":
        return False
    if metric not in metrics:
        raise UnknownNameError("metric", metric, [*metrics, "loss"])
    return metrics[metric].higher_is_better


def _first_rate(config: JobConfig) -> float | None:
    """Return the learning rate that a search begins at; None where `optimizer.lr` has no effect."""
    if config.schedule.name in OWN_RATES:
        return None
    default = inspect.signature(optimizers()[config.optimizer.name]).parameters["lr"].default
    rate = default if config.optimizer.lr is None else config.optimizer.lr
    return float(rate) if isinstance(rate, (int, float)) and rate > 0 else None


def _count_evaluations(config: JobConfig, experiment: Comparison | Sweep) -> int:
    """Count the evaluations of a run with the whole budget, the last one included."""
    if experiment.budget.keys() & {"samples", "steps"} and experiment.evaluations:
        return experiment.evaluations
    return 0 if experiment.budget or config.epochs is None else config.epochs // config.eval_every
