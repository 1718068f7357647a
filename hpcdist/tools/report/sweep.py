"""What a sweep shows: which settings are best, and which of them matter. No strategy is compared here."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from hpcdist.errors import DataError
from hpcdist.records import read_checked
from hpcdist.records.files import Count
from hpcdist.tools.compare.space import Axis
from hpcdist.tools.compare.study import JOURNAL, STUDY, journal_errors, open_journal
from hpcdist.tools.compare.trials import State
from hpcdist.tools.report import wording
from hpcdist.tools.report.verdict import Verdict
from hpcdist.tools.runs import SWEEP

LEAST = 4  # complete trials, from which importance is computed
EDGE = 0.05  # of a range: a best value so near its end may lie beyond


class SweptTrial(BaseModel):
    """A trial in `sweep.json`."""

    number: Count
    state: State
    settings: dict[str, str]
    value: FiniteFloat | None
    samples: Count | None
    folders: list[str]

    @property
    def measured(self) -> float:
        """Return the value; NaN without one."""
        return math.nan if self.value is None else self.value


class SweptSettings(BaseModel):
    """A sweep, as its `sweep.json` tells it; keys that the page does not read are kept as they are."""

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
    trials: list[SweptTrial]
    importance: dict[str, float] = Field({}, description="of each setting, adding up to 1; empty if not known")

    @model_validator(mode="after")
    def _has_the_settings_of_each_trial(self) -> SweptSettings:
        axes = {axis.key: axis for axis in self.space}
        for trial in self.trials:
            settings, started = trial.settings, trial.settings or trial.folders or trial.value is not None
            known = settings.keys() == axes.keys() and all(axes[key].contains(text) for key, text in settings.items())
            if started and not (known and trial.folders):
                raise ValueError(f"trial {trial.number} must have a value of each axis, and folders")
        return self

    def known(self, state: str) -> list[SweptTrial]:
        """List the trials of a state that have a value, the best first."""
        found = [trial for trial in self.trials if trial.state == state and trial.value is not None]
        return sorted(found, key=lambda trial: trial.measured, reverse=self.higher_is_better)

    @property
    def complete(self) -> list[SweptTrial]:
        return self.known("complete")


def read_sweep(folder: Path, *, importance: bool = True) -> SweptSettings:
    """Read the sweep in a folder.

    Args:
        importance: of each setting is computed, which takes a while.

    Raises:
        DataError: its file is damaged, or not there.
    """
    found = read_checked(folder / SWEEP, SweptSettings, "be what `hpcdist sweep` writes", "Make it again.")
    if found is None:
        raise DataError(f"{folder / SWEEP} must exist; got nothing there. Has the sweep begun?")
    found.importance = _importance(folder) if importance and len(found.complete) >= LEAST else {}
    return found


def _importance(folder: Path) -> dict[str, float]:
    """Ask Optuna which settings explain the metric of complete trials.

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


# --- the answer -------------------------------------------------------------------------------------------------------
def judge_sweep(found: SweptSettings) -> Verdict:
    """Say which settings are best, what is known of each, and what to bear in mind."""
    trials, complete, metric = found.trials, found.complete, found.metric
    states = Counter[str](trial.state for trial in trials)
    others = ("cut", "failed", "waiting", "running")
    counted = "".join(f"; {states[state]} {state}" for state in others if states[state])
    whole = f"{len(complete)} of {wording.count(len(trials), 'trial')} had the whole budget"
    reasons = [f"{whole}{counted}."]
    caveats = []
    if not complete:
        return Verdict("No trial has ended with the whole budget yet.", reasons, [])
    best = complete[0]
    headline = f"The best settings: {described(best)}, with {metric} {wording.value(metric, best.measured)}."
    if len(complete) > 1:
        second = complete[1]
        gap = wording.gap(metric, abs(best.measured - second.measured), sign=False)
        reasons.append(f"Next: {described(second)}, {gap} behind.")
    for key, share in found.importance.items():
        reasons.append(f"`{key}` explains {100 * share:.0f} % of the differences between complete trials.")
    for axis in found.space:
        if (end := _end(axis, best.settings[axis.key])) is not None:
            caveats.append(
                f"The best `{axis.key}` lies at the {end} end of its range: a wider range may hold a better one."
            )
    caveats.append(
        f"The best of {wording.count(len(trials), 'trial')} was also lucky"
        f"{', as each ran with one seed' if found.seeds == 1 else ''}: compare it again, on other seeds."
    )
    return Verdict(headline, reasons, caveats)


def described(trial: SweptTrial) -> str:
    """Write the settings of a trial."""
    return ", ".join(f"`{key}` {value}" for key, value in trial.settings.items())


def _end(axis: Axis, text: str) -> str | None:
    """Return at which end of a range a value lies; None for one within, and for values that were listed."""
    if axis.values:
        return None
    place = axis.position(text)
    return "lower" if place < EDGE else "upper" if place > 1 - EDGE else None
