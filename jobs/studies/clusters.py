"""Outer momentum where workers differ in speed and nobody waits: the toy task of delayed Nesterov momentum.

    python jobs/studies/clusters.py    # 45 minutes on 2 free cores; --quick: 15 s

Four workers need 0.58, 0.75, 1.51 and 3.33 s for a step, on virtual ranks; a period has 20 steps. All rules draw the
same number of batches: synchronous DiLoCo as many for each worker, at the pace of the slowest, the asynchronous rules
more for the faster ones. The outer learning rate ν of each rule is searched on a seed of its own, in steps of √10 until
both neighbours end with a lower accuracy. A run that is there is not made again.

Reference: Bo Liu et al., "Asynchronous local-SGD training for language modeling", 2024. Its 65,000 hidden units take 80
minutes a run (`--hidden 65000`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from hpcdist.tools.compare.comparison import FIRST_SEED
from hpcdist.tools.compare.plan import ComparedGroup
from hpcdist.tools.statistics import interval
from kit.groups import EndedRun, GroupRuns, declare_group, search
from kit.output import Claim, Study, paragraphs, start
from kit.pairs import difference, excludes

JOB = Path(__file__).with_name("clusters_job.py")
STEPS_S = (0.58, 0.75, 1.51, 3.33)  # of the workers
PERIOD, BATCH = 20, 32  # steps; samples
NETWORK = "20us,10Gbit/s"


@dataclass(frozen=True)
class Rule:
    """One way to step along what workers push."""

    name: str
    strategy: tuple[tuple[str, Any], ...]

    @property
    def waits(self) -> bool:
        return dict(self.strategy)["name"] == "diloco"


@dataclass(frozen=True)
class Scale:
    """How large the task is."""

    hidden: int = 2048
    points: int = 128_000
    batches: int = 8_000  # of all workers together: two passes
    seeds: int = 5

    def declare(self, rule: Rule, power: int) -> ComparedGroup:
        """Declare the runs of a rule with ν = 10^(power/2)."""
        settings = {
            "strategy": {**dict(rule.strategy), "period": PERIOD, "outer_lr": round(10 ** (power / 2), 4)},
            "model": {"hidden": self.hidden},
            "batch_size": BATCH,
            "batches": self.batches,
            "every": self.batches // 20,
        }
        first = 0 if rule.waits else 1  # rank 0 serves
        slower = [f"straggler:{first + n},{step_s / STEPS_S[0]:.4f}," for n, step_s in enumerate(STEPS_S) if n]
        compute = f"{''.join(slower)}{1000 * STEPS_S[0]:g}ms"
        return declare_group(rule.name, first + len(STEPS_S), settings, {"compute": compute}, loop=f"{JOB}:train")


def _asynchronous(name: str, **options: Any) -> Rule:
    return Rule(name, (("name", "async_diloco"), *options.items()))


SYNCHRONOUS = Rule("synchronous DiLoCo", (("name", "diloco"),))
NESTEROV = _asynchronous("Nesterov at each push", rule="nesterov")
DISCOUNTED = _asynchronous("Nesterov, discounted by staleness", rule="discounted")
BUFFERED = _asynchronous("Nesterov, once in four pushes", rule="buffered")
DELAYED = _asynchronous("delayed Nesterov")
DYNAMIC = _asynchronous("delayed Nesterov, dynamic periods", dynamic=True)
RULES = (SYNCHRONOUS, NESTEROV, DISCOUNTED, BUFFERED, DELAYED, DYNAMIC)
QUICK = Scale(hidden=16, points=4_096, batches=320, seeds=2)


# --- the runs and their results ---------------------------------------------------------------------------------------
@dataclass
class Results:
    """The runs of each rule at its ν, in the order of their seeds."""

    powers: dict[Rule, int]
    runs: dict[Rule, list[EndedRun]]

    def ends(self, rule: Rule) -> list[float]:
        """List the accuracies after all batches, in %."""
        return [100 * run.curve[-1].metrics["accuracy"] for run in self.runs[rule]]

    def at(self, rule: Rule, seconds: float) -> list[float]:
        """List the accuracies of the last evaluations until then, in %."""
        return [
            100 * [look for look in run.curve if look.seconds <= seconds][-1].metrics["accuracy"]
            for run in self.runs[rule]
        ]

    @property
    def quickest_s(self) -> float:
        """Give the seconds after which all runs of the quickest rule have ended."""
        return min(max(run.curve[-1].seconds for run in runs) for runs in self.runs.values())

    def rows(self) -> Iterator[dict[str, str]]:
        for rule, runs in self.runs.items():
            stale = fmean(run.summary.staleness.mean for run in runs)
            yield {
                "outer step": rule.name,
                "ν": f"{10 ** (self.powers[rule] / 2):.2g}",
                "accuracy in %": f"{interval(self.ends(rule)):.2f}",
                "when the quickest ends": f"{interval(self.at(rule, self.quickest_s)):.2f}",
                "s": f"{fmean(run.curve[-1].seconds for run in runs):,.0f}",
                "mean staleness": f"{stale:.2f}",
            }


def claims(results: Results) -> list[Claim]:
    """Hold what the publication says against the runs: differences are taken seed by seed."""
    naive = difference(results.ends(NESTEROV), results.ends(SYNCHRONOUS))
    matched = difference(results.ends(DYNAMIC), results.ends(SYNCHRONOUS))
    sooner = difference(results.ends(DYNAMIC), results.at(SYNCHRONOUS, results.quickest_s))
    others = {rule.name: difference(results.ends(DELAYED), results.ends(rule)) for rule in RULES[1:4]}
    listed = "; ".join(f"{by:+.2f} over {name}" for name, by in others.items())
    return [
        Claim(
            "With momentum at each push asynchronous training is worse than the synchronous one after as many batches.",
            [naive.high < 0],
            f"{naive:+.2f} points.",
        ),
        Claim(
            "Delayed momentum is better than momentum at each push, discounted or not, and than a step in four pushes.",
            [by.low > 0 for by in others.values()],
            f"{listed} (points).",
        ),
        Claim(
            "With dynamic periods it can't be told from the synchronous one, or is better, after as many batches.",
            [matched.low > 0 or not excludes(matched, 0)],
            f"{matched:+.2f} points.",
        ),
        Claim(
            "It is better after as many seconds.",
            [sooner.low > 0],
            f"{sooner:+.2f} points after {results.quickest_s:,.0f} s.",
        ),
    ]


# --- the study --------------------------------------------------------------------------------------------------------
def choose(groups: GroupRuns, scale: Scale, rule: Rule) -> int:
    """Search the rule's ν, as a power of √10."""

    def measure(power: int) -> float:
        (run,) = groups.measure(scale.declare(rule, power), [FIRST_SEED])
        return run.summary.metrics["accuracy"]

    return search(measure, lambda accuracy: -accuracy, -1, {})


def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, table and claims.")] = Path("runs/clusters"),
    quick: Annotated[bool, typer.Option(help="Few points and units: how it works, and no answer.")] = False,
    hidden: Annotated[int, typer.Option(min=1, help="Units of the hidden layer.")] = Scale.hidden,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    scale = QUICK if quick else Scale(hidden=hidden)
    settings = {"data": {"path": str(output / f"clusters-{scale.points}.h5")}}
    with GroupRuns(JOB, output, workers, settings=settings, cluster={"network": NETWORK}) as groups:
        groups.create_data()
        powers = groups.each(lambda rule: choose(groups, scale, rule), RULES, "ν searched")
        made = groups.make({rule: scale.declare(rule, powers[rule]) for rule in RULES}, range(scale.seeds))
    results, study = Results(powers, made), Study(output)
    title = f"{scale.hidden} hidden units, {scale.batches:,} batches of {BATCH}, {scale.seeds} seeds"
    study.write_csv("table.csv", study.table(title, results.rows(), "; means with 95 % intervals"))
    study.claims(paragraphs(claims(results)))
    study.end(run for runs in made.values() for run in runs)


if __name__ == "__main__":
    start(main)
