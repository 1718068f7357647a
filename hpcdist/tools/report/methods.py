"""Write the methods paragraph of a paper about the runs, from the template methods.txt.j2."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis
from hpcdist.tools.statistics import MIN_SEEDS
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
    job, groups = analysis.job, [group for group in analysis.groups if group.ended]
    runs = [item.run for group in groups for item in group.ended]
    starts = [run.start for run in runs if run.start]
    versions = {name: text for start in starts for name, text in start.versions.items() if text}
    seeds = {tuple(sorted({item.seed for item in group.ended})) for group in groups}
    tested = {group.tested for group in groups}
    budgets: list[Mapping[str, Any]] = [
        job.budget or {"epochs": item.settings.get("epochs"), **(item.settings.get("budget") or {})} for item in runs
    ]
    budget = budgets[0] if budgets and all(item == budgets[0] for item in budgets) else {}
    links = [start.virtual.get("network") for start in starts if start.virtual]
    steps = [start.virtual.get("compute") for start in starts if start.virtual]
    sign = "≥" if job.higher_is_better else "≤"
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined)
    env.filters |= {"joined": wording.joined, "amount": wording.amount}
    text = env.get_template("methods.txt.j2").render(
        job=job.name or "of these runs",
        is_sweep=job.is_sweep,
        kinds=list(dict.fromkeys(f"“{group.name}”" if "," in group.name else group.name for group in groups)),
        ranks=[str(ranks) for ranks in sorted({group.ranks for group in groups})] or ["1"],
        seeds=list(map(str, seeds.pop())) if len(seeds) == 1 else [],
        budget=[f"{wording.number(limit)} {unit}" for unit, limit in budget.items() if limit is not None],
        metric=job.metric,
        tested=tested.pop() if len(tested) == 1 else None,
        tuning=job.tuning,
        hosts={host for start in starts if not start.virtual for host in start.hosts},
        links=[item for number, item in enumerate(links) if item not in links[:number]],
        steps=list(dict.fromkeys(_steps(item) for item in steps if isinstance(item, Mapping))),
        target="" if job.target is None else f"{sign} {wording.value(job.metric, job.target)}",
        has_intervals=any(len(group.ended) >= MIN_SEEDS for group in groups),
        has_tests=any(item.difference is not None and not math.isnan(item.difference.p) for item in analysis.contrasts),
        version=versions.pop("hpcdist", __version__),
        versions=[text if name == "mpi" else f"{name} {text}" for name, text in versions.items()],
    )
    return re.sub("[ \n]+", " ", text).strip()


def optimizers_and_batches(analysis: Analysis) -> str:
    """Write with which optimisers, learning rates and batches the runs trained; empty if they are not recorded."""
    runs = [result.run for result in analysis.runs if result.run.ended]
    settings = [run.settings.get("optimizer") or {} for run in runs]
    batches = sorted({run.batch for run in runs if run.batch is not None})
    parts = {
        "optimiser": dict.fromkeys(str(s["name"]) for s in settings if "name" in s),
        "learning rate": [
            f"{rate:g}" for rate in sorted({s["lr"] for s in settings if isinstance(s.get("lr"), int | float)})
        ],
        "samples of a worker's step": list(map(str, batches)),
    }
    return "; ".join(f"{name}: {wording.joined(list(values))}" for name, values in parts.items() if values)


def _steps(compute: Mapping[str, Any]) -> str:
    """Say how long the steps of virtual ranks take, as `compute.describe` has written it."""
    given = {key: _steps(value) if isinstance(value, Mapping) else value for key, value in compute.items()}
    form = STEPS.get(str(given.get("model")))
    return "the times of a model of this run's own" if form is None else form.format_map(given)
