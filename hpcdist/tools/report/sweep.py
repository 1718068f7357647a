"""The page of a sweep: which settings are best, and which of them matter. No strategy is compared here."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from hpcdist.errors import DataError
from hpcdist.records import read_checked
from hpcdist.records.files import Count
from hpcdist.tools.compare.space import Axis
from hpcdist.tools.compare.study import JOURNAL, STUDY, named_faults, open_journal
from hpcdist.tools.compare.trials import State
from hpcdist.tools.report import wording
from hpcdist.tools.report.figures.base import COLOURS, WIDTH, ReportFigure, ReportTable, Section, axes_of
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
            settings, begun = trial.settings, trial.settings or trial.folders or trial.value is not None
            known = settings.keys() == axes.keys() and all(axes[key].has(text) for key, text in settings.items())
            if begun and not (known and trial.folders):
                raise ValueError(f"trial {trial.number} must have a value of each axis, and folders")
        return self

    def known(self, state: str) -> list[SweptTrial]:
        """List the trials of a state that have a value, the best first."""
        found = [trial for trial in self.trials if trial.state == state and trial.value is not None]
        return sorted(found, key=lambda trial: trial.measured, reverse=self.higher_is_better)

    @property
    def complete(self) -> list[SweptTrial]:
        return self.known("complete")


def read_sweep(folder: Path) -> SweptSettings:
    """Read the sweep in a folder.

    Raises:
        DataError: its file is damaged, or not there.
    """
    found = read_checked(folder / SWEEP, SweptSettings, "be what `hpcdist sweep` writes", "Make it again.")
    if found is None:
        raise DataError(f"{folder / SWEEP} must exist; got nothing there. Has the sweep begun?")
    found.importance = _importance(folder) if len(found.complete) >= LEAST else {}
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
    with named_faults(folder):
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
    headline = f"The best settings: {_described(best)}, with {metric} {wording.value(metric, best.measured)}."
    if len(complete) > 1:
        second = complete[1]
        gap = wording.gap(metric, abs(best.measured - second.measured), sign=False)
        reasons.append(f"Next: {_described(second)}, {gap} behind.")
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


def _described(trial: SweptTrial) -> str:
    return ", ".join(f"`{key}` {value}" for key, value in trial.settings.items())


def _end(axis: Axis, text: str) -> str | None:
    """Return at which end of a range a value lies; None for one within, and for values that were listed."""
    if axis.values:
        return None
    place = axis.place(text)
    return "lower" if place < EDGE else "upper" if place > 1 - EDGE else None


# --- sections ---------------------------------------------------------------------------------------------------------
def sections_of_sweep(found: SweptSettings) -> list[Section]:
    """Draw all sections of the page."""
    figures = [_over(found, number, axis) for number, axis in enumerate(found.space, 1)] if found.complete else []
    parallel = [_parallel(found)] if len(found.space) > 1 and found.complete else []
    shares = [[key, f"{100 * share:.0f} %"] for key, share in found.importance.items()]
    remark = (
        "Importance is the share of the differences between complete trials that a setting explains alone (fANOVA, "
        f"Hutter et al. 2014). It needs Optuna, and at least {LEAST} complete trials."
    )
    importance = [ReportTable("Importance", ["setting", "share"], shares)] if shares else []
    others = [_row(found, trial) for trial in found.trials if trial.state != "complete" and trial.settings]
    sections = [Section("answer", "The best first", {}, [_table(found)], [])]
    if figures:
        title = "Which settings matter"
        sections.append(Section("settings", title, {None: [*figures, *parallel]}, importance, [remark]))
    if others:
        heads = ["trial", "state", *(axis.key for axis in found.space), "samples", f"last {found.metric}"]
        said = f"Runs that `{found.pruner}` cut show the metric of their last evaluation."
        sections.append(
            Section("others", "Trials that were cut, or failed", {}, [ReportTable("Trials", heads, others)], [said])
        )
    return sections


def _table(found: SweptSettings) -> ReportTable:
    heads = ["place", *(axis.key for axis in found.space), found.metric, "samples", "folder"]
    rows = []
    for place, trial in enumerate(found.complete, 1):
        value = wording.value(found.metric, trial.measured)
        rows.append([str(place), *trial.settings.values(), value, _samples(trial), trial.folders[0]])
    return ReportTable("Trials with the whole budget, the best first", heads, rows)


def _row(found: SweptSettings, trial: SweptTrial) -> list[str]:
    value = wording.NONE if trial.value is None else wording.value(found.metric, trial.value)
    return [str(trial.number), trial.state, *trial.settings.values(), _samples(trial), value]


def _samples(trial: SweptTrial) -> str:
    return wording.NONE if trial.samples is None else wording.number(trial.samples)


def _over(found: SweptSettings, number: int, axis: Axis) -> ReportFigure:
    key, values = axis.key, list(axis.values)
    figure, axes = axes_of(2.6)
    for fill, state in (("none", "cut"), (COLOURS[0], "complete")):
        trials = found.known(state)
        x = [values.index(one.settings[key]) if values else float(one.settings[key]) for one in trials]
        y = [one.measured for one in trials]
        if trials:
            axes.plot(x, y, "o", markerfacecolor=fill, markeredgecolor=COLOURS[0], linestyle="none", label=state)
        if state == "complete":
            axes.plot(x[:1], y[:1], "D", color=COLOURS[1], markersize=8, label="the best")
    if values:
        axes.set_xticks(range(len(values)), values)
    elif axis.log:
        axes.set_xscale("log")
    axes.set_xlabel(key)
    axes.set_ylabel(found.metric)
    axes.legend(fontsize=9)
    best = found.complete[0]
    said = [f"the best trial has {key} {best.settings[key]} and {wording.value(found.metric, best.measured)}"]
    return ReportFigure(f"setting-{number}", f"{wording.capital(found.metric)} over {key}", said, figure)


def _parallel(found: SweptSettings) -> ReportFigure:
    """Draw each trial as a line through its settings and its metric: parallel coordinates."""
    figure, axes = axes_of(3.0)
    figure.set_figwidth(max(WIDTH, 1.2 * (len(found.space) + 1)))
    complete = found.complete
    low, high = sorted((complete[-1].measured, complete[0].measured))
    for rank, trial in reversed(list(enumerate(complete))):
        y = [axis.place(trial.settings[axis.key]) for axis in found.space]
        y.append((trial.measured - low) / (high - low) if high > low else 0.5)
        style: Any = {"color": COLOURS[1], "linewidth": 2.4} if rank == 0 else {"color": COLOURS[0], "alpha": 0.45}
        axes.plot(range(len(y)), y, **style)
    names = [*(_labelled(axis) for axis in found.space), f"{found.metric}\n{low:.4g} to {high:.4g}"]
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.set_yticks([0, 1], ["low", "high"])
    said = [f"{_described(complete[0])}: the best".replace("`", "")]
    return ReportFigure("parallel", "Settings and metric of each complete trial; the best stands out", said, figure)


def _labelled(axis: Axis) -> str:
    ends = (axis.values[0], axis.values[-1]) if axis.values else (f"{axis.low:.4g}", f"{axis.high:.4g}")
    return f"{axis.key}\n{ends[0]} to {ends[1]}{', log' if axis.log else ''}"
