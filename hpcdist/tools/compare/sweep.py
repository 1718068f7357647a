"""Run a sweep: the trials of an Optuna study, their runs, and a table sorted by result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pandas import DataFrame

from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.records import replace_durably
from hpcdist.tools import console
from hpcdist.tools.compare.experiment import Sweep
from hpcdist.tools.compare.folder import require_same, write
from hpcdist.tools.compare.plan import PlannedRun, groups, plan
from hpcdist.tools.compare.run_all import ExperimentRuns, Runner, missing
from hpcdist.tools.compare.trials import ETA, SweepTrial, Trials
from hpcdist.tools.runs import SWEEP

VERSION = 1
SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("asha", "median", "none")


class SweptRuns(ExperimentRuns):
    """The runs of a sweep; see `ExperimentRuns`. The constructor checks all settings and starts nothing.

    Args:
        folder: of all files. A sweep with the same settings there is resumed.

    Raises:
        ConfigError: a setting is wrong, Optuna is not installed, or the folder holds another sweep.
    """

    experiment: Sweep

    def __init__(self, experiment: Sweep, folder: Path):
        for option, name, known in (("sampler", experiment.sampler, SAMPLERS), ("pruner", experiment.pruner, PRUNERS)):
            if name not in known:
                raise UnknownNameError(f"--{option}", name, known)
        self._trials = Trials(folder, experiment)
        self.plan = plan(experiment, groups(experiment))  # without sampled settings
        super().__init__(experiment, folder)
        self.skipped, self._evaluations = self.trained.unknown, self.trained.evaluations
        self._require_prunable()
        self._require_values()
        require_same(folder, experiment)  # last: the error should name a wrong setting first

    def _require_prunable(self) -> None:
        """Raise ConfigError if there is a pruner, and several seeds or too few evaluations of a run."""
        experiment = self.experiment
        if experiment.pruner == "none":
            return
        if experiment.seeds > 1:
            raise ConfigError(
                f"--seeds must be 1 with --pruner {experiment.pruner}, which compares single runs; got "
                f"{experiment.seeds}. Take --pruner none, or compare the best settings on more seeds afterwards."
            )
        if self._evaluations < ETA:
            raise ConfigError(
                f"--pruner must be none if runs have fewer than {ETA} evaluations; got {experiment.pruner}, and "
                f"{self._evaluations} evaluations. Add --budget samples=N, or --evaluations {ETA} or more."
            )

    def _require_values(self) -> None:
        """Raise ConfigError if a run can't use a value of a setting; the other settings have their first value."""
        first = {axis.key: axis.ends[0] for axis in self._trials.axes}  # a listed value, or an end of the range
        points = [first | {axis.key: value} for axis in self._trials.axes for value in axis.ends]
        for settings in dict.fromkeys(tuple(f"{key}={value}" for key, value in point.items()) for point in points):
            if reason := self.trained.refusal(self._trials.run(0, 0, settings)):
                raise ConfigError(reason)

    # --- runs ---------------------------------------------------------------------------------------------------------
    def run(self, runner: Runner) -> list[PlannedRun]:
        """Execute the runs that are missing, each with settings sampled when it starts; return the failed ones."""
        self.write()
        self.trained.create_data()
        remaining = missing(self.plan, self.folder)
        with runner.display("runs", len(remaining)):
            failed = runner.run_all(self._started(remaining))
        self.write()
        return failed

    def _started(self, remaining: Sequence[PlannedRun]) -> Iterator[PlannedRun]:
        """Yield the remaining runs; a run's settings are sampled when it is taken from this iterator."""
        for index, planned in enumerate(self.plan):  # trial by trial, each with all seeds
            if planned in remaining:
                number, seed = divmod(index, self.experiment.seeds)
                run = self._trials.run(number, seed, self._trials.start(number))
                self._write_started()
                yield run

    # --- results ------------------------------------------------------------------------------------------------------
    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._trials.create(self.higher_is_better, self._evaluations)
        self._write_started()

    def _write_started(self) -> None:
        """Write `comparison.json` with the runs of started trials, and `sweep.json` with the state of all trials."""
        trials = self._trials.all()
        seeds = range(self.experiment.seeds)
        started = [trial for trial in trials if trial.settings]
        runs = [self._trials.run(trial.number, seed, trial.texts) for trial in started for seed in seeds]
        write(self.folder, self.experiment, higher_is_better=self.higher_is_better, groups=(), runs=runs)
        keys = ("job", "strategy", "ranks", "seeds", "metric", "sampler", "pruner")
        content = {
            "version": VERSION,
            **{key: getattr(self.experiment, key) for key in keys},
            "higher_is_better": self.higher_is_better,
            "space": [asdict(axis) for axis in self._trials.axes],
            "trials": [asdict(trial) for trial in trials],
        }
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        replace_durably(self.folder / SWEEP, text.encode())

    def show_table(self) -> None:
        console.rows(f"{self.experiment.job}: the best settings first", self.rows())

    @property
    def best(self) -> dict[str, str]:
        """Return the settings of the best finished trial, by key; empty if none has finished."""
        row = next((row for row in self.rows() if row["state"] == "complete"), {})
        return {axis.key: row[axis.key] for axis in self._trials.axes if row}

    @property
    def table(self) -> DataFrame:
        return DataFrame(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows, one per started trial: the best first, then pruned (cut), running, failed ones."""
        order = ("complete", "cut", "running", "failed")

        def sort_key(trial: SweepTrial) -> tuple[float, ...]:  # of pruned trials, those that trained longest first
            cost = math.inf if trial.value is None else -trial.value if self.higher_is_better else trial.value
            return order.index(trial.state), -(trial.samples or 0) if trial.state == "cut" else 0, cost

        trials = sorted((trial for trial in self._trials.all() if trial.settings), key=sort_key)
        metric = self.experiment.metric
        return [
            {"trial": trial.number, **trial.settings, "samples": trial.samples or 0, metric: trial.value}
            | {"state": trial.state}
            for trial in trials
        ]
