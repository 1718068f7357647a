"""The sections of a sweep's page: its trials, and the metric over each setting."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import LogLocator, NullLocator

from hpcdist.tools.compare.space import Axis
from hpcdist.tools.report import wording
from hpcdist.tools.report.figures.base import COLOURS, WIDTH, ReportFigure, ReportTable, Section, axes_of
from hpcdist.tools.report.sweep import LEAST, SweptSettings, SweptTrial, described


def facts_of_sweep(found: SweptSettings) -> dict[str, str]:
    """List what was asked, for the page's head."""
    return {
        "metric": f"{found.metric} ({'higher' if found.higher_is_better else 'lower'} is better)",
        "strategy": f"`{found.strategy}` on {wording.count(found.ranks, 'rank')}",
        "sampler": found.sampler,
        "pruner": found.pruner,
        "trials": f"{len(found.complete)} of {len(found.trials)} with the whole budget",
    }


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
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:g}")
        axes.xaxis.set_minor_locator(NullLocator())
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
        y = [axis.position(trial.settings[axis.key]) for axis in found.space]
        y.append((trial.measured - low) / (high - low) if high > low else 0.5)
        style: Any = {"color": COLOURS[1], "linewidth": 2.4} if rank == 0 else {"color": COLOURS[0], "alpha": 0.45}
        axes.plot(range(len(y)), y, **style)
    names = [*(_labelled(axis) for axis in found.space), f"{found.metric}\n{low:.4g} to {high:.4g}"]
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.set_yticks([0, 1], ["low", "high"])
    said = [f"{described(complete[0])}: the best".replace("`", "")]
    return ReportFigure("parallel", "Settings and metric of each complete trial; the best stands out", said, figure)


def _labelled(axis: Axis) -> str:
    ends = (axis.values[0], axis.values[-1]) if axis.values else (f"{axis.low:.4g}", f"{axis.high:.4g}")
    return f"{axis.key}\n{ends[0]} to {ends[1]}{', log' if axis.log else ''}"
