"""The trials of a sweep, each a combination of settings, as an Optuna study in the sweep's folder.

All processes that execute runs of the sweep share the study, on any host. A trial's settings are sampled when its first
run starts, from the results known by then. A trial with an interrupted or failed run stays "running" in the study, so
that the same command resumes it.

Reference: Takuya Akiba, Shotaro Sano, Toshihiko Yanase, Takeru Ohta, Masanori Koyama, "Optuna: a next-generation
hyperparameter optimization framework", 2019.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from hpcdist import strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.config.files import neighbours
from hpcdist.config.job import JobConfig
from hpcdist.errors import ConfigError, DataError, HpcdistError, require_packages
from hpcdist.records import Summary, drop_partial_line, load_summary, locked, making, read_bounded, read_evaluations
from hpcdist.records.files import Count, faults_of
from hpcdist.session.run import on_rank_0
from hpcdist.tools.compare import folder
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.plan import PlannedRun, mean_metric, plan, trial_group
from hpcdist.tools.compare.script import ScriptCall
from hpcdist.tools.compare.space import Axis, points, read_axis
from hpcdist.tools.runs import FAILURE, is_done
from hpcdist.train import runs

if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.log"
LOCK = f"{JOURNAL}.lock"  # Optuna's lock while it appends
STUDY = "sweep"  # the study's name in the journal
CUT = "cut by the sweep's pruner"  # why a run ended before its budget
ETA = 3  # `asha` continues the best third
FIRST = 9  # pruners judge a run first after 1/9 of its evaluations
TURN_S = 60.0  # timeout for the study's lock
_FOLDER = re.compile(r"trial-(\d+)-.*-s(\d+)")
State = Literal["waiting", "running", "failed", "cut", "complete"]


@dataclass(frozen=True)
class SweepTrial:
    """A trial, as `sweep.json` lists it.

    Attributes:
        state: "cut" if the pruner has ended it.
        settings: values by key; empty before they are sampled.
        value: the metric's mean over the trial's runs; of a pruned trial, from the last evaluation.
        samples: of its first run, once that has ended.
        folders: of its runs, in the sweep's folder; empty before the settings are sampled.
    """

    number: Count
    state: State
    settings: dict[str, str]
    value: FiniteFloat | None
    samples: Count | None
    folders: list[str]

    @property
    def measured(self) -> float:
        return math.nan if self.value is None else self.value

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the settings as for `--set`."""
        return tuple(f"{key}={value}" for key, value in self.settings.items())


class Trials:
    """The trials of a sweep in its folder.

    Raises:
        ConfigError: Optuna is not installed, or `over` can't be parsed.
    """

    def __init__(self, output: Path, sweep: Sweep):
        require_packages("hpcdist sweep", "sweep", "optuna")
        self.output, self.sweep = output, sweep
        self.axes = [read_axis(text) for text in sweep.over]
        self._planned: dict[tuple[int, int, tuple[str, ...]], PlannedRun] = {}
        self._samples: dict[Path, int] = {}  # of finished runs

    def create(self, higher_is_better: bool, evaluations: int) -> None:
        """Create the study with all trials waiting; add missing trials to an existing study.

        Args:
            evaluations: of a run with the whole budget.
        """
        import optuna

        goal = optuna.study.StudyDirection.MAXIMIZE if higher_is_better else optuna.study.StudyDirection.MINIMIZE
        with self._locked():
            study = optuna.create_study(storage=self._journal, study_name=STUDY, direction=goal, load_if_exists=True)
            study.set_user_attr("first", max(1, evaluations // FIRST))  # evaluations before a run is judged
            for point in points(self.sweep)[len(study.get_trials(deepcopy=False)) :]:
                study.enqueue_trial(point)

    # --- runs ---------------------------------------------------------------------------------------------------------
    def start(self, number: int) -> tuple[str, ...]:
        """Sample the settings of a trial, unless it was started before, and return them as KEY=VALUE."""
        import optuna

        with self._locked():
            study = self._study(number)
            self._report_finished(study)
            frozen = study.get_trials(deepcopy=False)[number]
            if frozen.state == optuna.trial.TrialState.WAITING:
                # study.ask() would start the first waiting trial, not this one.
                study._storage.set_trial_state_values(frozen._trial_id, optuna.trial.TrialState.RUNNING)
            elif frozen.state.is_finished():
                return self._trial(frozen).texts
            trial = optuna.Trial(study, frozen._trial_id)
            for axis in self.axes:
                _suggest(trial, axis)
            return self._trial(study.get_trials(deepcopy=False)[number]).texts

    def run(self, number: int, seed: int, settings: tuple[str, ...]) -> PlannedRun:
        """Plan a run of a trial with its sampled settings, which may change a job's batch size."""
        if (number, seed, settings) not in self._planned:
            group, job = trial_group(self.sweep, number, settings), Path(self.sweep.job)
            if self.sweep.arguments is None:
                with neighbours(job):
                    _, config = runs.specify(job, None, (*self.sweep.settings, *group.settings))
                group = replace(group, samples=step_samples(config, self.sweep.ranks))
            self._planned[number, seed, settings] = group.run(self.sweep, seed)
        return self._planned[number, seed, settings]

    def judge(self, number: int, run: Path) -> str | None:
        """Report a run's newest evaluation to the study; return the reason if the pruner stops the run here."""
        import optuna

        with self._locked():
            study = self._study(number)
            frozen, evaluations = study.get_trials(deepcopy=False)[number], read_evaluations(run)
            if frozen.state.is_finished():  # the run's summary was deleted, to run it again
                return None
            trial, step = optuna.Trial(study, frozen._trial_id), len(evaluations)
            if step not in frozen.intermediate_values:  # a resumed run reports a step again
                trial.report(evaluations[-1].metrics[self.sweep.metric], step)
            return CUT if trial.should_prune() else None

    def all(self) -> list[SweepTrial]:
        """List the state of all trials; empty before the study exists."""
        if not (self.output / JOURNAL).exists():
            return []
        with self._locked():
            study = self._study(0)
            self._report_finished(study)
            return [self._trial(frozen) for frozen in study.get_trials(deepcopy=False)]

    # --- the study ----------------------------------------------------------------------------------------------------
    @cached_property
    def _journal(self) -> optuna.storages.JournalStorage:
        return open_journal(self.output)  # kept open: each use reads only what was appended

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the study, and clean up after a killed process: half a line at the journal's end, Optuna's lock file."""
        lock_folder = self.output / "runs"
        with making(lock_folder):
            lock_folder.mkdir(exist_ok=True)
        with locked(lock_folder, TURN_S), journal_errors(self.output):
            (self.output / LOCK).unlink(missing_ok=True)
            drop_partial_line(self.output / JOURNAL)
            yield

    def _study(self, number: int) -> optuna.Study:
        """Load the study with a sampler seeded by the trial's number, so that samples are reproducible."""
        import optuna

        sampler_class = optuna.samplers.TPESampler if self.sweep.sampler == "tpe" else optuna.samplers.RandomSampler
        study = optuna.load_study(study_name=STUDY, storage=self._journal, sampler=sampler_class(seed=number))
        first: int = study.user_attrs["first"]
        study.pruner = {
            "asha": optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=ETA),
            "median": optuna.pruners.MedianPruner(n_warmup_steps=first),
            "none": optuna.pruners.NopPruner(),
        }[self.sweep.pruner]
        return study

    def _report_finished(self, study: optuna.Study) -> None:
        """Report to the study each trial whose runs have all finished: its mean metric, or that it was pruned."""
        from optuna.trial import TrialState

        for frozen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            folders = self._folders(frozen.number)
            if not all(map(is_done, folders)):
                continue
            summaries = [load_summary(path) for path in folders]
            value = mean_metric(summaries, self.sweep.metric)
            if any(CUT in (summary.stopped_early or "") for summary in summaries):
                study.tell(frozen.number, state=TrialState.PRUNED)
            elif value is None:  # NaN or infinite
                study.tell(frozen.number, state=TrialState.FAIL)
            else:
                study.tell(frozen.number, value)

    def _folders(self, number: int) -> list[Path]:
        return [self.output / run.folder for run in plan(self.sweep, [trial_group(self.sweep, number)])]

    def _trial(self, frozen: optuna.trial.FrozenTrial) -> SweepTrial:
        """Return a trial; it has failed if one of its runs has, though the study keeps it running."""
        states: dict[str, State] = {"WAITING": "waiting", "COMPLETE": "complete", "PRUNED": "cut", "FAIL": "failed"}
        state, folders, settings = states.get(frozen.state.name, "running"), self._folders(frozen.number), {}
        if state == "running" and any((path / FAILURE).exists() for path in folders):
            state = "failed"
        if all(axis.key in frozen.params for axis in self.axes):
            settings = {axis.key: axis.text(frozen.params[axis.key]) for axis in self.axes}
        if settings and folders[0] not in self._samples and is_done(folders[0]):
            self._samples[folders[0]] = load_summary(folders[0]).samples
        value = frozen.value if frozen.value is not None and math.isfinite(frozen.value) else None
        listed = [str(path.relative_to(self.output)) for path in folders if settings]
        return SweepTrial(frozen.number, state, settings, value, self._samples.get(folders[0]), listed)


# --- Optuna's journal -------------------------------------------------------------------------------------------------
class _Line(BaseModel):
    """A line of the journal, checked more strictly than Optuna does, which ignores an id of a wrong type."""

    model_config = ConfigDict(strict=True)

    op_code: Count
    worker_id: str
    study_id: Count = 0
    trial_id: Count = 0
    step: Count = 0
    param_name: str = ""
    user_attr: dict[str, Any] = {}
    system_attr: dict[str, Any] = {}
    values: list[float] | None = None
    intermediate_value: float = 0.0
    param_value_internal: float = 0.0


@contextmanager
def journal_errors(folder: Path) -> Iterator[None]:
    """Turn the errors that Optuna raises on a damaged journal into DataError."""
    try:
        yield
    except HpcdistError:
        raise
    except (OSError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = faults_of(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error!s:.200}"
        raise DataError(
            f"{folder / JOURNAL} must be a journal of `hpcdist sweep`; got {reason}. Restore it from a copy, or give "
            "another folder."
        ) from error


def open_journal(folder: Path) -> optuna.storages.JournalStorage:
    """Open or create the journal of a sweep, and silence Optuna's log lines; raise DataError if it is damaged."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = (folder / JOURNAL).absolute()  # absolute: Optuna's lock is a symbolic link to it
    with journal_errors(folder):
        for line in read_bounded(path).split(b"\n")[:-1] if path.exists() else ():  # the last may be incomplete
            _Line.model_validate_json(line)
        return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


# --- a run on its ranks -----------------------------------------------------------------------------------------------
def train(
    comm: Communicator, run: Path, ends_at: float | None = None, command: Sequence[str] = ()
) -> tuple[Path, Summary | None]:
    """Collective. Execute or resume the sweep's run in this folder; see `hpcdist.train.runs.train`.

    Only rank 0 opens the sweep: it samples the settings, reports each evaluation, and asks the pruner.

    Raises:
        ConfigError: the folder belongs to no sweep; or as for other runs.
    """

    def start() -> tuple[str, list[str], bool, bool]:  # job, settings, whether to resume, whether there is a pruner
        trials, number, seed = find_trial(run)
        overrides = trials.run(number, seed, trials.start(number)).overrides
        has_started = any(run.glob("records-rank*.jsonl"))
        return trials.sweep.job, list(overrides), has_started, trials.sweep.pruner != "none"

    def judge(folder: Path) -> str | None:
        trials, number, _ = find_trial(folder)
        return trials.judge(number, folder)

    job, overrides, resume, has_pruner = on_rank_0(comm, start)
    judged = judge if has_pruner else None
    return runs.train(comm, Path(job), None, overrides, run, resume, None, ends_at, command, judge=judged)


def find_script(run: Path) -> tuple[Comparison | Sweep, PlannedRun, ScriptCall] | None:
    """Return the experiment, the planned run and the call of a script's run in this folder; None if it trains a job.

    Called by each rank; the first caller samples the settings of a sweep's trial.
    """
    output = run.parent.parent
    content = folder.read(output) or {"declared": {}}
    if content["declared"].get("arguments") is None:
        return None
    experiment: Comparison | Sweep
    if "over" in content["declared"]:
        trials, number, seed = find_trial(run)
        experiment, planned = trials.sweep, trials.run(number, seed, trials.start(number))
    else:
        experiment = folder.read_experiment(output, Comparison)
        entry = next(entry for entry in content["runs"] if output / entry["folder"] == run)
        planned = PlannedRun(*(entry[key] for key in ("name", "kind", "ranks", "seed", "set", "folder")))
    return experiment, planned, ScriptCall(experiment.job, experiment.arguments or (), planned.overrides, run)


def find_trial(run: Path) -> tuple[Trials, int, int]:
    """Return trials, trial number and seed of a run's folder; raise ConfigError if it belongs to no sweep."""
    output, match = run.parent.parent, _FOLDER.fullmatch(run.name)
    if match is None:
        raise ConfigError(f"--output must be the folder of a run of `hpcdist sweep`; got {run}.")
    return Trials(output, folder.read_experiment(output, Sweep)), int(match[1]), int(match[2])


def step_samples(config: JobConfig, ranks: int) -> int:
    """Return the number of samples of a step, summed over all ranks."""
    options = strategies.load(config.strategy.name).Config.from_mapping(config.strategy.options, "strategy")
    return len(options.workers(ranks // config.parallel.stages)) * config.batch_size * config.accumulation


def _suggest(trial: optuna.Trial, axis: Axis) -> None:
    """Sample a setting of a trial, unless the trial has it already."""
    if axis.values:
        trial.suggest_categorical(axis.key, axis.values)
    elif axis.whole:
        trial.suggest_int(axis.key, int(axis.low), int(axis.high), log=axis.log)
    else:
        trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log)
