"""Results of a sweep: the best settings, and how much each setting matters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hpcdist.errors import DataError
from hpcdist.records import read_checked
from hpcdist.records.files import Count
from hpcdist.tools import console
from hpcdist.tools.compare.space import Axis
from hpcdist.tools.compare.trials import JOURNAL, STUDY, SweepTrial, journal_errors, open_journal
from hpcdist.tools.report import wording
from hpcdist.tools.report.verdict import Verdict
from hpcdist.tools.runs import SWEEP

LEAST, ROUGH = 4, 20  # complete trials, to compute importance; fewer than ROUGH give a rough one
EDGE = 0.05  # fraction of a range: a best value this close to its end may lie beyond


class SweptSettings(BaseModel):
    """A sweep, read from `sweep.json`; unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    job: str
    strategy: str
    metric: str
    sampler: str
    pruner: str
    ranks: Count
    seeds: Count
    higher_is_better: bool
    space: Annotated[list[Axis], Field(min_length=1)]
    trials: list[SweepTrial]
    importance: dict[str, float] = Field({}, description="of each setting, sum 1; empty if unknown")

    @model_validator(mode="after")
    def _has_the_settings_of_each_trial(self) -> SweptSettings:
        axes = {axis.key: axis for axis in self.space}
        for trial in self.trials:
            settings, started = trial.settings, trial.settings or trial.folders or trial.value is not None
            has_all = settings.keys() == axes.keys() and all(axes[key].contains(text) for key, text in settings.items())
            if started and not (has_all and trial.folders):
                raise ValueError(f"trial {trial.number} must have a value of each axis, and folders")
        return self

    def known(self, state: str) -> list[SweepTrial]:
        """List the trials in a state that have a value, the best first."""
        trials = [trial for trial in self.trials if trial.state == state and trial.value is not None]
        return sorted(trials, key=lambda trial: trial.measured, reverse=self.higher_is_better)

    @property
    def complete(self) -> list[SweepTrial]:
        return self.known("complete")


def read_sweep(folder: Path, *, importance: bool = True) -> SweptSettings:
    """Read the sweep in a folder.

    Args:
        importance: compute the importance of each setting, which takes a while.

    Raises:
        DataError: its file is damaged or missing.
    """
    swept = read_checked(folder / SWEEP, SweptSettings, "be written by `hpcdist sweep`", "Run it again.")
    if swept is None:
        raise DataError(f"{folder / SWEEP} must exist; got nothing there. Has the sweep started?")
    swept.importance = _importance(folder) if importance and len(swept.complete) >= LEAST else {}
    return swept


def _importance(folder: Path) -> dict[str, float]:
    """Compute with Optuna (fANOVA) how much each setting explains of the complete trials' metric.

    Reference: Frank Hutter, Holger Hoos, Kevin Leyton-Brown, "An efficient approach for assessing hyperparameter
    importance", 2014.
    """
    try:
        import optuna
    except ImportError:
        return {}
    if not (folder / JOURNAL).exists():
        return {}
    with journal_errors(folder):
        study = optuna.load_study(study_name=STUDY, storage=open_journal(folder))
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


# --- conclusion -------------------------------------------------------------------------------------------------------
def judge_sweep(swept: SweptSettings) -> Verdict:
    """Write the conclusion on a sweep: the best settings, their importance, and caveats."""
    trials, complete, metric = swept.trials, swept.complete, swept.metric
    states = Counter[str](trial.state for trial in trials)
    others = ("cut", "failed", "waiting", "running")
    counted = "".join(f"; {states[state]} {state}" for state in others if states[state])
    summary = f"{len(complete)} of {console.count(len(trials), 'trial')} had the whole budget"
    reasons = [f"{summary}{counted}."]
    caveats = []
    if not complete:
        return Verdict("No trial has finished its budget yet.", reasons, [])
    best = complete[0]
    headline = f"The best settings: {described(best)}, with {metric} {wording.value(metric, best.measured)}."
    if len(complete) > 1:
        second = complete[1]
        gap = wording.gap(metric, abs(best.measured - second.measured), sign=False)
        reasons.append(f"Next: {described(second)}, {gap} behind.")
    for key, share in swept.importance.items():
        rough = f" (rough: fewer than {ROUGH})" * (len(complete) < ROUGH)
        of_trials = f"of the differences between {len(complete)} complete trials{rough}"
        reasons.append(f"`{key}` explains {100 * share:.0f} % {of_trials}.")
    for axis in swept.space:
        if (end := _end(axis, best.settings[axis.key])) is not None:
            caveats.append(
                f"The best `{axis.key}` lies at the {end} end of its range: a wider range may hold a better one."
            )
    caveats.append(
        f"The best of {console.count(len(trials), 'trial')} is partly luck"
        f"{', as each ran with one seed' if swept.seeds == 1 else ''}: compare it again on other seeds."
    )
    return Verdict(headline, reasons, caveats)


def described(trial: SweepTrial) -> str:
    return ", ".join(f"`{key}` {value}" for key, value in trial.settings.items())


def _end(axis: Axis, text: str) -> str | None:
    """Return "lower" or "upper" if a value lies near that end of a range; None otherwise, and for listed values."""
    if axis.values:
        return None
    position = axis.position(text)
    return "lower" if position < EDGE else "upper" if position > 1 - EDGE else None
