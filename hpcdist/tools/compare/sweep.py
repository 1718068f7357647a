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
from hpcdist.records import load_summary, replace_durably
from hpcdist.tools import console
from hpcdist.tools.compare.experiment import Sweep
from hpcdist.tools.compare.folder import require_same, write
from hpcdist.tools.compare.plan import PlannedRun, groups, plan
from hpcdist.tools.compare.run_all import ExperimentRuns, Runner, missing
from hpcdist.tools.compare.trials import ETA, SweepTrial, Trials
from hpcdist.tools.runs import SWEEP, is_done

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
        self._planned: dict[tuple[int, int], PlannedRun] = {}  # of started trials
        self._trained: dict[str, int] = {}  # samples of finished runs, by folder
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
        ends = [axis.ends for axis in self._trials.axes]  # of each setting, all listed values or the ends of its range
        first = [values[0] for values in ends]
        points = [[*first[:index], value, *first[index + 1 :]] for index, values in enumerate(ends) for value in values]
        for point in dict.fromkeys(map(tuple, points)):
            settings = tuple(f"{axis.key}={value}" for axis, value in zip(self._trials.axes, point, strict=True))
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
                run = self._plan(number, seed, self._trials.start(number))
                self._write_started()
                yield run

    def _plan(self, number: int, seed: int, settings: tuple[str, ...]) -> PlannedRun:
        if (number, seed) not in self._planned:
            self._planned[number, seed] = self._trials.run(number, seed, settings)
        return self._planned[number, seed]

    # --- results ------------------------------------------------------------------------------------------------------
    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._trials.create(self.higher_is_better, self._evaluations)
        self._write_started()

    def _write_started(self) -> None:
        """Write `comparison.json` with the runs of started trials, and `sweep.json` with the state of all trials."""
        trials = self._trials.all()
        started = {trial.number: trial.settings for trial in trials if trial.settings is not None}
        seeds = range(self.experiment.seeds)
        runs = [self._plan(number, seed, settings) for number, settings in started.items() for seed in seeds]
        write(self.folder, self.experiment, higher_is_better=self.higher_is_better, groups=(), runs=runs)
        keys = ("job", "strategy", "ranks", "seeds", "metric", "sampler", "pruner")
        content = {
            "version": VERSION,
            **{key: getattr(self.experiment, key) for key in keys},
            "higher_is_better": self.higher_is_better,
            "space": [asdict(axis) for axis in self._trials.axes],
            "trials": [self._entry(trial) for trial in trials],
        }
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        replace_durably(self.folder / SWEEP, text.encode())

    def _entry(self, trial: SweepTrial) -> dict[str, Any]:
        """Return a trial's entry in `sweep.json`."""
        settings = dict(setting.split("=", 1) for setting in trial.settings or ())
        folders = [run.folder for run in self._trials.planned_runs(trial.number)] if settings else []
        value = trial.value if trial.value is not None and math.isfinite(trial.value) else None
        return {
            "number": trial.number,
            "state": trial.state,
            "settings": settings,
            "value": value,
            "samples": self._samples(folders[0]) if folders else None,
            "folders": folders,
        }

    def _samples(self, run: str) -> int | None:
        """Return the number of samples that a run has trained; None before it has finished."""
        if run not in self._trained and is_done(self.folder / run):
            self._trained[run] = load_summary(self.folder / run).samples
        return self._trained.get(run)

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
        """Return the table's rows, one per started trial: the best first, then pruned, running and failed ones."""
        order = ("complete", "cut", "running", "failed")
        rows = []
        for trial in self._trials.all():
            if trial.settings is None:
                continue
            entry = self._entry(trial)
            value = entry["value"] if trial.state in ("complete", "cut") else None
            merit = math.inf if value is None else -value if self.higher_is_better else value
            samples = entry["samples"] or 0
            row = {"trial": trial.number, **entry["settings"], "samples": samples, self.experiment.metric: value}
            row["state"] = trial.state
            # Pruned trials: those that trained longest first.
            rows.append(((order.index(trial.state), -trial.evaluations if trial.state == "cut" else 0, merit), row))
        return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
