"""The answer in words, made from the numbers by rules that it states."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from statistics import fmean

from hpcdist.study import Interval, interval
from regression_study.protocols import CASES, JOB_CASE, JOB_CONTROLS, JOB_REFERENCE, SERIAL
from regression_study.protocols import Budget, Results, Setup, difference, real

COLUMNS = 120


def paragraph(results: Results, job: Mapping[Setup, Sequence[float]], epochs: int) -> str:
    apart = [results.apart(case, budget) for budget in results.budgets for case in CASES]
    better, worse = sum(found.high < 0 for found in apart), sum(found.low > 0 for found in apart)
    sentences = [
        f"Of {len(apart)} comparisons with the serial run the cases are more accurate in {better} and less accurate in "
        f"{worse} (the 95 % interval of the paired difference excludes 0; where nothing differs, 1 in 20 does).",
        _overfitting(results),
        *(_under(results, budget) for budget in results.budgets),
        "A control matches a difference if it differs from the serial run the same way and the case can't be told from "
        f"it. Gradients in the cases are {_staleness(results):.2f} updates old on average.",
        _job(job, epochs),
    ]
    return textwrap.fill(" ".join(sentences), COLUMNS, break_on_hyphens=False)


def job_row(setup: Setup, job: Mapping[Setup, Sequence[float]]) -> dict[str, str]:
    """A row of the job's table."""
    apart = "" if setup is JOB_REFERENCE else _marked(difference(job[setup], job[JOB_REFERENCE]))
    return {"": setup.name, "RMSE": f"{interval(job[setup]):.3f}", f"minus {JOB_REFERENCE.name}": apart}


def explanation(case: Sequence[float], reference: Sequence[float], controls: Mapping[str, Sequence[float]]) -> str:
    """Whether runs of a case and of a reference differ, and which controls differ from the reference alike."""
    apart = difference(case, reference)
    if not real(apart):
        return "cannot be told from 0"
    found = "more accurate, " if apart.mean < 0 else "less accurate, "
    rest = {name: difference(case, values) for name, values in controls.items()}
    own = {name: difference(values, reference) for name, values in controls.items()}
    nearest = sorted(rest, key=lambda name: abs(rest[name].mean))
    matching = [n for n in nearest if real(own[n]) and own[n].mean * apart.mean > 0 and not real(rest[n])]
    if not matching:
        name = nearest[0]
        left = f"the nearest, {name}: {_signed(own[name])}, leaves {_signed(rest[name])}"
        return f"{found}matched by no control ({left})"
    return found + "matched by " + " and by ".join(f"{name} ({_signed(own[name])})" for name in matching)


def _under(results: Results, budget: Budget) -> str:
    told = []
    for number, case in enumerate(CASES, 1):
        compared = [control for control in case.controls() if control in budget.protocols()]
        controls = {control.name: results.rmse(control, budget) for control in compared}
        text = explanation(results.rmse(case, budget), results.rmse(SERIAL, budget), controls)
        told.append(f"case {number} {_signed(results.apart(case, budget))}, {text}")
    return f"With {budget.name}: {'; '.join(told)}."


def _overfitting(results: Results) -> str:
    """How the serial run itself goes on: what more updates do."""
    curves = [run.measured["rmse"] for run in results.runs[SERIAL.training]]
    means = {int(clock): fmean(curve[clock] for curve in curves) for clock in curves[0]}
    lowest = min(means, key=means.__getitem__)
    later = 2 * results.steps
    return (
        f"The serial run's RMSE is {means[results.steps]:.3f} after its {results.steps:,} steps, was lowest after "
        f"{lowest:,} ({means[lowest]:.3f}), and would be {means[later]:.3f} after {later:,}."
    )


def _staleness(results: Results) -> float:
    return fmean(run.measured["staleness_mean"] for case in CASES for run in results.runs[case.training])


def _job(job: Mapping[Setup, Sequence[float]], epochs: int) -> str:
    means = {setup: f"{interval(values):.3f}" for setup, values in job.items()}
    controls = {control.name: job[control] for control in JOB_CONTROLS}
    return (
        f"The job as it is (Adam with a falling rate, batch {JOB_CASE.batch} per worker, {epochs} epochs) ends at "
        f"{means[JOB_CASE]} with {JOB_CASE.name} and at {means[JOB_REFERENCE]} with {JOB_REFERENCE.name}, a difference "
        f"of {_signed(difference(job[JOB_CASE], job[JOB_REFERENCE]))}: the server is "
        f"{explanation(job[JOB_CASE], job[JOB_REFERENCE], controls)}."
    )


def _signed(found: Interval) -> str:
    return f"{found.mean:+.3f} ± {found.half:.3f}"


def _marked(found: Interval) -> str:
    return _signed(found) + "*" * real(found)
