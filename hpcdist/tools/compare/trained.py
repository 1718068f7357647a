"""What an experiment trains: a job, or a script with its own training loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist import strategies
from hpcdist.config.files import neighbours
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import load
from hpcdist.config.optimizer import OWN_RATES, optimizers
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.registry import catalogue
from hpcdist.session.run import arguments_by_name
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.plan import ComparedGroup, PlannedRun, groups
from hpcdist.tools.compare.script import OF_EVERY_RUN, placeholders
from hpcdist.tools.compare.space import read_axis
from hpcdist.tools.report.results import CHECKPOINTS, is_higher_better
from hpcdist.train.job import prepare_data
from hpcdist.train.planning import rehearse
from hpcdist.train.runs import specify


class TrainedJob:
    """A job's file.

    Attributes:
        groups: see `plan.groups`.
        higher_is_better: a larger value of the experiment's metric is better.
        first_rate: first learning rate of a search; None: the job's rates are not `optimizer.lr`.
        evaluations: evaluations of a run, the last one included; 0: unknown.
        unknown: one sentence for each check that is skipped for lack of information.
        reads_strategy: it is passed the strategy's name, and may depend on it.
    """

    unknown: Sequence[str] = ()
    reads_strategy = False

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
                "are not optimizer.lr; got it. Set its options instead."
            )
        config = self.config
        self.groups = groups(experiment, config.batch_size, config.accumulation, config.parallel.stages)

    def refusal(self, run: PlannedRun) -> str | None:
        """Check a run's settings; return why it can't run on this number of ranks, or None. Other errors are raised."""
        with neighbours(self._path):
            _, config = specify(self._path, None, run.overrides)
            if run.kind == "baseline":
                if not config.parallel.whole:
                    return "its ranks hold the whole model, but parallel.stages is more than 1."
                return catalogue("baselines").load(run.name).why_not()
            return _rehearsed(config, run.ranks)

    def create_data(self) -> None:
        """Create the job's data file if it is missing, since concurrent runs can't."""
        with neighbours(self._path):
            prepare_data(self._job, self.config)


class TrainedScript:
    """A script or function with its own training loop, of unknown batch size and learning rate; see `TrainedJob`.

    Raises:
        ConfigError: an option is for jobs only, or the script does not take what differs between its runs.
    """

    first_rate: float | None = None
    evaluations = 0

    def __init__(self, experiment: Comparison | Sweep):
        self._experiment, controls = experiment, isinstance(experiment, Comparison) and experiment.controls
        self.higher_is_better = is_higher_better(experiment.metric)
        options = {"set": "settings", "budget": "budget", "tune": "tune", "rate": "rates", "baselines": "baselines"}
        for option, name in options.items():
            if value := getattr(experiment, name, None):
                raise ConfigError(f"--{option} must be omitted with a script; got {value}. Pass arguments behind --.")
        if isinstance(experiment, Sweep) and (experiment.pruner != "none" or not experiment.metric):
            raise ConfigError(
                "--target must be given, and --pruner omitted, to sweep over a script, whose metrics are unknown "
                f"before it runs; got {experiment.metric or 'no target'}, {experiment.pruner}. Write --target "
                "loss=0.1, say."
            )
        names = placeholders(experiment.job, experiment.arguments or ())
        self.reads_strategy = "strategy" in names
        self._check_placeholders(names)
        skipped = ", and there are no serial controls" * controls
        self.groups = groups(experiment)
        self.unknown = [f"{experiment.job} sets its batch size and its end: runs are not cut{skipped}"]

    def _check_placeholders(self, names: set[str]) -> None:
        """Raise ConfigError if a setting that differs between runs has no placeholder, or a placeholder no value."""
        experiment, is_function = self._experiment, ".py:" in self._experiment.job
        where = "the function's parameters" if is_function else "the {NAME} in ARGS"
        swept = [read_axis(text).key for text in experiment.over] if isinstance(experiment, Sweep) else []
        differing = [*(key for key in swept if key.partition(".")[0] != "strategy"), *["seed"] * (experiment.seeds > 1)]
        got = ", ".join(sorted(names)) or "none"
        if lacking := [name for name in differing if name not in names]:
            raise ConfigError(
                f"{where} must include {lacking[0]}, otherwise all runs would be identical; got {got}. Write "
                f"-- --{lacking[0]} {{{lacking[0]}}}{', or give --seeds 1' * (lacking[0] == 'seed')}."
            )
        if not is_function and not names <= {*OF_EVERY_RUN, *swept}:
            raise ConfigError(f"{where} must be of {', '.join([*OF_EVERY_RUN, *swept])}; got {got}. Remove others.")
        for name, path in arguments_by_name(experiment.arguments or (), Path("{run}")).items():
            if path and CHECKPOINTS.fullmatch(name):
                raise ConfigError(
                    "ARGS must put the checkpoints of each run into its own folder, since another run would continue "
                    f"from those in {path}; got --{name} {path}. Write --{name} {{run}}/checkpoints."
                )

    def refusal(self, run: PlannedRun) -> str | None:
        """Check the options of a run's strategy; see `TrainedJob.refusal`."""
        settings = [text for text in run.overrides if text.startswith("strategy")]
        return _rehearsed(JobConfig.from_mapping(load({}, None, settings)), run.ranks)

    def create_data(self) -> None:
        """Do nothing: the script creates its data."""


def _rehearsed(config: JobConfig, ranks: int) -> str | None:
    """Return why the settings can't train on this number of ranks, or None."""
    try:
        rehearse(config, ranks)
    except UnknownNameError:  # wrong on any number of ranks
        raise
    except ConfigError as error:
        return str(error)
    return None


def is_plain(group: ComparedGroup) -> bool:
    """Return whether the group's strategy is known to take the plain optimizer's steps on one rank."""
    options = load({}, None, group.settings)["strategy"]
    name = options if isinstance(options, str) else options["name"]
    cls = strategies.load(name)
    is_builtin = cls.__module__.startswith("hpcdist.strategies.")  # tests check these
    has_own_rule = cls.contract.step == "the strategy's" or cls.contract.batch == "portions"
    return is_builtin and not has_own_rule and not {"on_nonfinite", "provider"} & set(options)


def higher_is_better(metrics: Mapping[str, Any], metric: str) -> bool:
    """Return whether a larger value of a job's metric is better; raise UnknownNameError for an unknown metric."""
    if metric == "loss":
        return False
    if metric not in metrics:
        raise UnknownNameError("metric", metric, [*metrics, "loss"])
    return metrics[metric].higher_is_better


def _first_rate(config: JobConfig) -> float | None:
    """Return the learning rate at which a search starts; None if `optimizer.lr` has no effect."""
    if config.schedule.name in OWN_RATES:
        return None
    default = inspect.signature(optimizers()[config.optimizer.name]).parameters["lr"].default
    rate = default if config.optimizer.lr is None else config.optimizer.lr
    return float(rate) if isinstance(rate, (int, float)) and rate > 0 else None


def _count_evaluations(config: JobConfig, experiment: Comparison | Sweep) -> int:
    """Count the evaluations of a run with the whole budget, the last one included; 0: unknown."""
    if experiment.budget.keys() & {"samples", "steps"} and experiment.evaluations:
        return experiment.evaluations
    return 0 if experiment.budget or config.epochs is None else config.epochs // config.eval_every
