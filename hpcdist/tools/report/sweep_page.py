"""The sections of a sweep's page: its trials, and the metric over each setting."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import LogLocator, NullLocator

from hpcdist.tools import console
from hpcdist.tools.compare.space import Axis
from hpcdist.tools.compare.trials import SweepTrial
from hpcdist.tools.report import wording
from hpcdist.tools.report.figures.base import COLOURS, WIDTH, ReportFigure, ReportTable, Section, axes_of
from hpcdist.tools.report.sweep import LEAST, ROUGH, SweptSettings, described


def facts_of_sweep(swept: SweptSettings) -> dict[str, str]:
    """List the sweep's settings for the page's head."""
    return {
        "metric": f"{swept.metric} ({'higher' if swept.higher_is_better else 'lower'} is better)",
        "strategy": f"`{swept.strategy}` on {console.count(swept.ranks, 'rank')}",
        "sampler": swept.sampler,
        "pruner": swept.pruner,
        "trials": f"{len(swept.complete)} of {len(swept.trials)} with the whole budget",
    }


def sections_of_sweep(swept: SweptSettings) -> list[Section]:
    """Draw the sections: the complete trials, which settings matter, and the other trials."""
    sections = [Section("answer", "The best first", {}, [_table(swept)], [])]
    if swept.complete:
        figures = [_metric_over_setting(swept, number, axis) for number, axis in enumerate(swept.space, 1)]
        figures += [_parallel(swept)] if len(swept.space) > 1 else []
        shares = [[key, f"{100 * share:.0f} %"] for key, share in swept.importance.items()]
        importance = [ReportTable("Importance", ["setting", "share"], shares)] if shares else []
        remark = (
            "Importance is the share of the variance between complete trials that a setting alone explains (fANOVA, "
            f"Hutter et al. 2014). It needs Optuna and {LEAST} or more complete trials; below {ROUGH} it is rough."
        )
        sections.append(Section("settings", "Which settings matter", {None: figures}, importance, [remark]))
    if others := [_row(swept, trial) for trial in swept.trials if trial.state != "complete" and trial.settings]:
        heads = ["trial", "state", *(axis.key for axis in swept.space), "samples", f"last {swept.metric}"]
        note = f"Runs that `{swept.pruner}` cut show the metric of their last evaluation."
        table = ReportTable("Trials", heads, others)
        sections.append(Section("others", "Trials that were cut, or failed", {}, [table], [note]))
    return sections


def _table(swept: SweptSettings) -> ReportTable:
    """Return the table of complete trials, the best first."""
    heads = ["place", *(axis.key for axis in swept.space), swept.metric, "samples", "folder"]
    rows = []
    for place, trial in enumerate(swept.complete, 1):
        value = wording.value(swept.metric, trial.measured)
        rows.append([str(place), *trial.settings.values(), value, _samples(trial), trial.folders[0]])
    return ReportTable("Trials with the whole budget, the best first", heads, rows)


def _row(swept: SweptSettings, trial: SweepTrial) -> list[str]:
    value = wording.NONE if trial.value is None else wording.value(swept.metric, trial.value)
    return [str(trial.number), trial.state, *trial.settings.values(), _samples(trial), value]


def _samples(trial: SweepTrial) -> str:
    return wording.NONE if trial.samples is None else wording.number(trial.samples)


def _metric_over_setting(swept: SweptSettings, number: int, axis: Axis) -> ReportFigure:
    """Plot the metric of complete and pruned trials over one setting; `number` tells figures apart by name."""
    key, values = axis.key, list(axis.values)
    figure, axes = axes_of(2.6)
    for fill, state in (("none", "cut"), (COLOURS[0], "complete")):
        trials = swept.known(state)
        x = [values.index(trial.settings[key]) if values else float(trial.settings[key]) for trial in trials]
        y = [trial.measured for trial in trials]
        if trials:
            axes.plot(x, y, "o", markerfacecolor=fill, markeredgecolor=COLOURS[0], linestyle="none", label=state)
        if state == "complete":
            axes.plot(x[:1], y[:1], "D", color=COLOURS[1], markersize=8, label="the best")
    if values:
        axes.set_xticks(range(len(values)), values)
    elif axis.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(key)
    axes.set_ylabel(swept.metric)
    axes.legend(fontsize=9)
    best = swept.complete[0]
    alt_text = [f"The best trial has {key} {best.settings[key]} and {wording.value(swept.metric, best.measured)}"]
    return ReportFigure(f"setting-{number}", f"{wording.capital(swept.metric)} over {key}", alt_text, figure)


def _parallel(swept: SweptSettings) -> ReportFigure:
    """Draw parallel coordinates: each trial is a line through its settings and its metric."""
    figure, axes = axes_of(3.0)
    figure.set_figwidth(max(WIDTH, 1.2 * (len(swept.space) + 1)))
    complete = swept.complete
    low, high = sorted((complete[-1].measured, complete[0].measured))
    for place, trial in reversed(list(enumerate(complete))):
        y = [axis.position(trial.settings[axis.key]) for axis in swept.space]
        y.append((trial.measured - low) / (high - low) if high > low else 0.5)
        style: Any = {"color": COLOURS[1], "linewidth": 2.4} if place == 0 else {"color": COLOURS[0], "alpha": 0.45}
        axes.plot(range(len(y)), y, **style)
    ends = [(axis.values or (f"{axis.low:.4g}", f"{axis.high:.4g}")) for axis in swept.space]
    names = [f"{axis.key}\n{values[0]} to {values[-1]}{', log' * axis.log}" for axis, values in zip(swept.space, ends)]
    names.append(f"{swept.metric}\n{low:.4g} to {high:.4g}")
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.set_yticks([0, 1], ["low", "high"])
    alt_text = [f"{described(complete[0])}: the best".replace("`", "")]
    return ReportFigure("parallel", "Settings and metric of each complete trial; the best stands out", alt_text, figure)
