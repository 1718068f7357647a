"""Say in a paragraph how runs were made and compared, for a paper; methods.txt.j2 has its sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis
from hpcdist.tools.statistics import LEAST_SEEDS
from hpcdist.version import __version__

STEPS = {  # by the class of a compute model
    "Constant": "{seconds:.3g} s each",
    "Jitter": "{mean_s:.3g} s on average, gamma-distributed with a coefficient of variation of {cv:g}",
    "Exponential": "{mean_s:.3g} s on average, exponentially distributed",
    "Straggler": "{base}, {factor:g} times as long on rank {rank}",
    "SlowSteps": "{base}, of which a share of {probability:g} takes {factor:g} times as long",
    "Replay": "the times that were recorded in the run {source}",
}


def methods(analysis: Analysis) -> str:
    """Write the paragraph: strategies, ranks, seeds, budget, network, statistics, versions, citation."""
    job, cells = analysis.job, [cell for cell in analysis.cells if cell.ended]
    runs = [one.run for cell in cells for one in cell.ended]
    starts = [run.start for run in runs if run.start]
    versions = {name: text for start in starts for name, text in start.versions.items() if text}
    seeds = {tuple(sorted({one.seed for one in cell.ended})) for cell in cells}
    tested = {cell.tested for cell in cells}
    budgets: list[Mapping[str, Any]] = [
        job.budget or {"epochs": one.settings.get("epochs"), **(one.settings.get("budget") or {})} for one in runs
    ]
    budget = budgets[0] if budgets and all(one == budgets[0] for one in budgets) else {}
    links = [start.virtual.get("network") for start in starts if start.virtual]
    steps = [start.virtual.get("compute") for start in starts if start.virtual]
    sign = "≥" if job.higher_is_better else "≤"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"joined": wording.joined, "amount": wording.amount}
    text = environment.get_template("methods.txt.j2").render(
        job=job.name or "of these runs",
        is_sweep=job.is_sweep,
        kinds=list(dict.fromkeys(f"“{cell.name}”" if "," in cell.name else cell.name for cell in cells)),
        ranks=[str(ranks) for ranks in sorted({cell.ranks for cell in cells})] or ["1"],
        seeds=list(map(str, seeds.pop())) if len(seeds) == 1 else [],
        budget=[f"{wording.number(most)} {unit}" for unit, most in budget.items() if most is not None],
        metric=job.metric,
        tested=tested.pop() if len(tested) == 1 else None,
        tuning=job.tuning,
        hosts={host for start in starts if not start.virtual for host in start.hosts},
        links=[one for number, one in enumerate(links) if one not in links[:number]],
        steps=list(dict.fromkeys(_steps(one) for one in steps if isinstance(one, Mapping))),
        target="" if job.target is None else f"{sign} {wording.value(job.metric, job.target)}",
        has_intervals=any(len(cell.ended) >= LEAST_SEEDS for cell in cells),
        has_tests=any(one.better is not None and not math.isnan(one.better.p) for one in analysis.contrasts),
        version=versions.pop("hpcdist", __version__),
        versions=[text if name == "mpi" else f"{name} {text}" for name, text in versions.items()],
    )
    return re.sub("[ \n]+", " ", text).strip()


def _steps(compute: Mapping[str, Any]) -> str:
    """Say how long the steps of virtual ranks take, as `compute.describe` has written it."""
    given = {key: _steps(value) if isinstance(value, Mapping) else value for key, value in compute.items()}
    form = STEPS.get(str(given.get("model")))
    return "the times of a model of this run's own" if form is None else form.format_map(given)
