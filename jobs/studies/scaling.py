"""Which scales better, all-reduce or asynchronous training? Loss against virtual time on 4 to 128 workers.

    python jobs/studies/scaling.py          # about 15 minutes on 2 free cores; --quick: half a minute
    pip install -e '.[tools,plots]'               # what it needs beside the library

The question of Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
2016, who found that asynchronous methods, elastic averaging and gossip, converge faster on few nodes (to about 32), and
that synchronous all-reduce scales better to more (about 100) and converges most consistently. Here `allreduce`,
`easgd`, `gossip_pull` and `gossip_push` really train a model on a virtual cluster. What was chosen, and why:

- p is the number of workers, which all compute gradients; easgd's server comes on top. On 64 and 128 workers easgd is
  run with 4 servers too, for one server's link then has more to carry than it can.
- Budget: 4,096 gradients of all workers together, whatever strategy and p. They are handed out one by one, so that a
  slow worker takes fewer; with all-reduce every worker takes 4,096/p. Each is of 2 samples, so that a batch of all 128
  workers, 256, is about where larger ones stop to pay: with far larger ones nothing scales, with one sample all would.
- Data and model: scikit-learn's 1,797 digits, a quarter of them for testing; a perceptron with 32 hidden units, SGD
  with momentum 0.9 and a constant rate on every worker, without warm-up.
- Rates: for each strategy, p and target the power of 2 that gets there soonest, on two seeds of its own, found by
  trying neighbours until the best one's are worse. This contains linear scaling, and hands no strategy another's rate.
  Rates are chosen with stragglers and kept for even steps. easgd exchanges every 4 steps with β = 0.9, the library's
  choice: at every step one server's link would be full with 7 workers.
- Time: a step takes 0.2 s, varying by 10 % (gamma-distributed); with `stragglers` each step of each worker takes 4
  times as long with a probability of 1 %, with `even` none does. The network is 10 Gbit/s with 20 µs of latency for a
  ResNet-18 of 46.8 MB, scaled down with the model: one transfer of all parameters takes 37.4 ms. Nobody overlaps
  transfers with gradients, and arithmetic outside of gradients takes no time. A link carries one transfer after the
  other, so that a crowded server's short messages queue behind long ones: more than real switches make them wait.
- Loss: cross-entropy of the test set on what the workers stand for together (all-reduce's parameters, the mean of
  gossip's, easgd's centre), looked at every 32 gradients without any virtual time passing. There are two targets, of
  which the stricter one leaves time to make up for a slow beginning: 0.35, where about 9 % of the test images are
  wrong, and 0.2, where 5 % are.

The 26 groups are run with five seeds, which tuning does not see, with both kinds of steps and each target's rates:
about 330 runs, for most rates are the same, beside about 190 for the rates. The folder holds all of them, those for the
rates in `tuning`, and `hpcdist report` makes a page of it. A run that is there is not made again.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcdist.tools.compare.comparison import FIRST_SEED
from hpcdist.tools.compare.plan import ComparedGroup
from hpcdist.tools.statistics import Interval, interval
from kit import plots
from kit.groups import EndedRun, GroupRuns, at_rate, declare_group, search
from kit.output import Claim, Study, paragraphs, start
from kit.pairs import ratio
from scaling_job import model_bytes

SYNCHRONOUS = "allreduce"  # what the others are held against
OPTIONS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {"algorithm": "native"},  # by formula: a ring, every message of which would be simulated, ends alike
    "easgd": {"period": 4, "beta": 0.9},
    "gossip_pull": {},
    "gossip_push": {},
}
STRAGGLERS, EVEN = "stragglers", "even"
COMPUTE = {STRAGGLERS: "slow:0.01,4,jitter:200ms,0.1", EVEN: "jitter:200ms,0.1"}
NETWORK = f"20us,{model_bytes(32) / 0.0374:.12g}B/s"  # 46.8 MB at 1.25 GB/s
BATCH, MOMENTUM = 2, 0.9
JOB = Path(__file__).with_name("scaling_job.py")

Curve = Sequence[Sequence[float]]  # gradients, virtual seconds and test loss of each look


# --- what is run ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunGroup:
    """A strategy on so many workers; `servers` come on top of them."""

    strategy: str
    workers: int
    servers: int = 0

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.servers} servers" if self.servers > 1 else self.strategy

    def declare(self, grid: Grid, steps: str) -> ComparedGroup:
        """Declare the runs, at a rate that is yet to be found."""
        options = {"name": self.strategy, **OPTIONS[self.strategy], "on_nonfinite": "ignore"}
        if self.servers:
            options["servers"] = self.servers
        settings = {
            "strategy": options,
            "optimizer": {"name": "SGD", "momentum": MOMENTUM},
            "model": {"hidden": 32},
            "batch_size": BATCH,
            "budget": {"samples": grid.gradients * BATCH},
            "eval_every_samples": grid.every * BATCH,
        }
        ranks, cluster = self.workers + self.servers, {"compute": COMPUTE[steps]}
        return declare_group(f"{self.name}, {steps}", ranks, settings, cluster, loop=f"{JOB}:train")

    def guess(self) -> int:
        """Guess the power of 2 at which to look for the best rate first.

        A mean over p samples lets all-reduce's rate grow with p, until curvature ends it.
        """
        doublings = self.workers.bit_length() - 1
        return {SYNCHRONOUS: min(-1, doublings - 7), "easgd": -5}.get(self.strategy, doublings // 2 - 6)


@dataclass(frozen=True)
class Grid:
    """Every strategy on every number of workers; where servers are many, one that is worth them. `seeds` for each."""

    workers: Sequence[int] = (4, 8, 16, 32, 64, 128)
    steps: Sequence[str] = (STRAGGLERS, EVEN)
    sharded: Sequence[int] = (64, 128)  # numbers of workers on which easgd has SHARDS servers too
    gradients: int = 4096  # of all workers together: a multiple of each number of workers
    every: int = 32  # gradients between two looks
    targets: Sequence[float] = (0.35, 0.2)  # test losses
    seeds: int = 5
    tuning_seeds: int = 2

    def groups(self) -> list[RunGroup]:
        """List all, those with the most workers first, for they take longest."""
        found = [RunGroup("easgd", workers, SHARDS) for workers in self.sharded]
        found += [RunGroup(name, workers, int(name == "easgd")) for name in OPTIONS for workers in self.workers]
        return sorted(found, key=lambda group: (-group.workers, group.strategy, group.servers))


SHARDS = 4
QUICK = Grid((2, 4), (STRAGGLERS,), sharded=(4,), gradients=384, every=32, targets=(0.8,), seeds=2, tuning_seeds=1)


# --- the runs and their results ---------------------------------------------------------------------------------------
@dataclass
class Results:
    """With one kind of steps and one target: the runs of each group, in the order of their seeds, and their rates."""

    grid: Grid
    steps: str
    target: float
    rates: dict[RunGroup, float]
    runs: dict[RunGroup, list[EndedRun]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.steps}, to a loss of {self.target:g}"

    def names(self) -> list[str]:
        """List the strategies' names, all-reduce first."""
        return sorted({group.name for group in self.runs}, key=lambda name: (name.split(",")[0] != SYNCHRONOUS, name))

    def of(self, name: str) -> list[RunGroup]:
        """List a strategy's groups, few workers first."""
        return sorted((group for group in self.runs if group.name == name), key=lambda group: group.workers)

    def group(self, name: str, workers: int) -> RunGroup | None:
        return next((group for group in self.of(name) if group.workers == workers), None)

    def first(self, group: RunGroup) -> RunGroup:
        """Find the same strategy on its fewest workers."""
        return self.of(group.strategy)[0]

    def curves(self, group: RunGroup) -> list[Curve]:
        """List (gradients, virtual seconds, test loss) of each look, run by run."""
        return list(map(curve, self.runs[group]))

    def losses(self, group: RunGroup) -> list[float]:
        """List the losses at the end, run by run."""
        return [curve[-1][2] for curve in self.curves(group)]

    def times_s(self, group: RunGroup) -> list[float]:
        """List the seconds to the target, run by run; infinite where it is not reached."""
        return [time_to(curve, self.target) for curve in self.curves(group)]

    def reached(self, group: RunGroup) -> bool:
        """Tell whether every run has come to the target."""
        return all(map(math.isfinite, self.times_s(group)))

    def ratio(self, group: RunGroup, other: RunGroup) -> Interval | None:
        """Estimate the time to the target over that of another group; None where one does not reach it."""
        if not (self.reached(group) and self.reached(other)):
            return None
        return ratio(self.times_s(group), self.times_s(other))

    def spread(self, group: RunGroup) -> float:
        """Compute half of the final loss's interval over its mean: how much runs differ."""
        loss = interval(self.losses(group))
        return loss.half / loss.mean

    def rows(self) -> Iterator[dict[str, Any]]:
        """Make the table: one row per group."""
        for name in self.names():
            for group in self.of(name):
                curves, seconds = self.curves(group), self.times_s(group)
                first, reaching = self.first(group), [s for s in seconds if math.isfinite(s)]
                gained = self.ratio(first, group) if group is not first else None
                yield {
                    "strategy": group.name,
                    "p": group.workers,
                    "rate": f"{self.rates[group]:g}",
                    "final loss": f"{interval(self.losses(group)):.3f}",
                    "s to target": f"{interval(seconds):.1f}" if self.reached(group) else "",
                    "reached": f"{len(reaching)}/{len(seconds)}",
                    f"faster than on {first.workers}": "" if gained is None else f"{gained:.1f}",
                    "gradients to target": _count(curves, self.target),
                    "s per step": f"{fmean(curve[-1][1] * group.workers / curve[-1][0] for curve in curves):.3f}",
                }


def _count(curves: Sequence[Sequence[Sequence[float]]], target: float) -> str:
    """Count the gradients of all workers until the target, on average; empty where a run does not reach it."""
    found = [next((taken for taken, _, loss in curve if loss <= target), None) for curve in curves]
    return "" if None in found else f"{fmean(found):.0f}"


def curve(run: EndedRun) -> Curve:
    """List (gradients, virtual seconds, test loss) of each look at a run."""
    return [(look.step, look.seconds, look.metrics["loss"]) for look in run.curve]


def time_to(curve: Curve, target: float) -> float:
    """Find when the loss is first at most `target`, linear between two looks, in virtual seconds; infinite if never."""
    for (_, before_s, above), (_, after_s, loss) in itertools.pairwise(curve):
        if loss <= target:
            part = (above - target) / (above - loss) if above > loss else 1.0
            return before_s + min(1.0, part) * (after_s - before_s)
    return math.inf


# --- the rate of a group ----------------------------------------------------------------------------------------------
def tune(groups: GroupRuns, grid: Grid, group: RunGroup) -> dict[str, Any]:
    """Search the power of 2 that is the best rate for each target, from a guess, on seeds of its own.

    Best is the shortest mean time to the target or, where no rate gets there with every seed, the lowest final loss.
    """
    curves: dict[int, list[Curve]] = {}  # by powers

    def measure(power: int) -> list[Curve]:
        seeds = range(FIRST_SEED, FIRST_SEED + grid.tuning_seeds)
        return list(map(curve, groups.measure(at_rate(group.declare(grid, STRAGGLERS), 2.0**power), seeds)))

    best = {target: search(measure, partial(merit, target=target), group.guess(), curves) for target in grid.targets}
    tried = {power: {target: merit(found, target) for target in best} for power, found in sorted(curves.items())}
    return {"best": best, "tried": tried}


def merit(curves: Sequence[Curve], target: float) -> tuple[float, float]:
    """Compute mean seconds to the target and mean final loss: the less the better, in this order."""
    return fmean(time_to(curve, target) for curve in curves), fmean(curve[-1][2] for curve in curves)


def rate_rows(group: RunGroup, found: dict) -> list[dict]:
    """Make a row per target and rate that was tried for a group."""
    return [
        {
            "strategy": group.name,
            "p": group.workers,
            "target": target,
            "rate": 2.0**power,
            "s to target": merits[target][0],
            "final loss": merits[target][1],
            "": "chosen" * (power == chosen),
        }
        for target, chosen in found["best"].items()
        for power, merits in found["tried"].items()
    ]


# --- what the paper claims, held against what was measured ------------------------------------------------------------
FEW = 32  # workers, up to which the asynchronous methods should be ahead


def claims(of_all: Sequence[Results]) -> list[Claim]:
    """Judge three claims for each kind of steps and target."""
    return [claim(results) for results in of_all for claim in (few, many, consistency)]


def few(results: Results) -> Claim:
    parts, told = [], []
    for reference, others in _by_workers(results):
        if reference.workers <= FEW:
            ratios = {group.name: results.ratio(group, reference) for group in others}
            reaching = {name: ratio for name, ratio in ratios.items() if ratio is not None}
            first = min(reaching, key=lambda name: reaching[name].mean, default=None)
            parts.append(first is not None and reaching[first].high < 1)
            ahead = "none with every seed" if first is None else f"{first} {reaching[first]:.2f}"
            told.append(f"p = {reference.workers}: {ahead}")
    return Claim(
        f"With {_words(results)}, asynchronous methods reach it sooner on up to {FEW} workers.",
        parts,
        f"Time of the fastest of them over all-reduce's, of runs of the same seed: {'; '.join(told)}. Sooner is where "
        "the 95 % interval lies below 1.",
    )


def many(results: Results) -> Claim:
    parts, told = [], []
    for reference, others in _by_workers(results):
        if reference.workers > FEW:
            ratios = {group.name: results.ratio(group, reference) for group in others}
            behind = [results.reached(reference) and (ratio is None or ratio.low > 1) for ratio in ratios.values()]
            parts.append(all(behind))
            listed = ", ".join(f"{name} {'not always' if r is None else f'{r:.2f}'}" for name, r in ratios.items())
            told.append(f"p = {reference.workers}: {listed}")
    last = [results.of(name)[-1] for name in results.names()]
    gains = ", ".join(f"{group.name} {_gain(results, group)}" for group in last)
    return Claim(
        f"With {_words(results)}, all-reduce reaches it before all of them on more than {FEW}.",
        parts,
        f"Their times over all-reduce's: {'; '.join(told) or 'not run'}. All is before where no other reaches the "
        f"target with every seed in less than all-reduce's time. How many times sooner than on its fewest workers each "
        f"strategy is on its most: {gains}.",
    )


def consistency(results: Results) -> Claim:
    parts, told = [], []
    for reference, others in _by_workers(results):
        own, least = results.spread(reference), min(others, key=results.spread)
        parts.append(own <= results.spread(least))
        losses = interval(results.losses(reference)), interval(results.losses(least))
        told.append(f"p = {reference.workers}: {losses[0]:.3f}, {least.name} {losses[1]:.3f}")
    return Claim(
        f"With {_words(results)}, all-reduce converges most consistently.",
        parts,
        f"Final test loss, of all-reduce and of the other whose runs differ least: {'; '.join(told)}. Most consistent "
        "is whose interval is the smallest part of its mean.",
    )


def _by_workers(results: Results) -> Iterator[tuple[RunGroup, list[RunGroup]]]:
    """Yield all-reduce on each number of workers, and the others on as many."""
    for reference in results.of(SYNCHRONOUS):
        found = (results.group(name, reference.workers) for name in results.names())
        yield reference, [group for group in found if group not in (None, reference)]


def _gain(results: Results, group: RunGroup) -> str:
    gained = results.ratio(results.first(group), group)
    return "does not reach it" if gained is None else f"{gained:.1f}"


def _words(results: Results) -> str:
    steps = "stragglers" if results.steps == STRAGGLERS else "even steps"
    return f"{steps} and a target of {results.target:g}"


# --- figures ----------------------------------------------------------------------------------------------------------
POINTS = 200  # of a curve
STYLES = (("C0", "o"), ("C1", "s"), ("C3", "D"), ("C2", "^"), ("C4", "v"))


def figures(of_all: Sequence[Results]) -> dict[str, Figure]:
    found = {f"loss_time_{results.steps}_{results.target:g}": loss_time(results) for results in of_all}
    return {**found, "target_workers": target_workers(of_all)}


def loss_time(results: Results) -> Figure:
    """Draw test loss against virtual time, a panel per number of workers: means of all seeds and their intervals."""
    workers = results.grid.workers
    figure, panels = plots.panels(len(workers), (4.2, 3.4), columns=3, sharey=True)
    for axes, p in zip(panels, workers):
        for (colour, _), name in zip(STYLES, results.names()):
            group = results.group(name, p)
            if group is not None:
                _curve(axes, results, group, colour)
        drawn = np.concatenate([line.get_ydata() for panel in panels for line in panel.lines])
        axes.set_ylim(drawn.min() / 1.2, drawn.max() * 1.2)  # a few seeds' intervals may be far wider
        axes.axhline(results.target, **plots.RULE)
        axes.set(title=f"p = {p}", xlabel="virtual time [s]")
        plots.plain_logs(axes)
    panels[0].set_ylabel("test loss of the consensus")
    figure.suptitle(f"{results.title}: {results.grid.gradients} gradients of all workers together")
    return figure


def _curve(axes: Axes, results: Results, group: RunGroup, colour: str) -> None:
    curves = results.curves(group)
    shortest_s = fmean(curve[-1][1] for curve in curves) / len(curves[0])
    moments = np.geomspace(shortest_s, min(curve[-1][1] for curve in curves), POINTS)
    logs = np.array([np.interp(moments, *np.array(curve)[:, 1:].T) for curve in curves])
    found = [interval(column) for column in np.log(logs).T.tolist()]
    axes.plot(moments, [np.exp(value.mean) for value in found], color=colour, linewidth=1, label=group.name)
    if len(curves) > 1:
        low, high = ([np.exp(getattr(value, end)) for value in found] for end in ("low", "high"))
        axes.fill_between(moments, low, high, color=colour, alpha=0.2, linewidth=0)


def target_workers(of_all: Sequence[Results]) -> Figure:
    """Draw virtual time to the target against workers: where the lines cross, another strategy is the fastest."""
    figure, panels = plots.panels(len(of_all), (5.2, 3.8), columns=2, sharey=True)
    for axes, results in zip(panels, of_all):
        for (colour, marker), name in zip(STYLES, results.names()):
            groups = [group for group in results.of(name) if results.reached(group)]
            found = [interval(results.times_s(group)) for group in groups]
            if groups:
                plots.error_bars(axes, [group.workers for group in groups], found, name, color=colour, marker=marker)
        axes.set(title=results.title, xlabel="workers", ylabel="virtual time [s]")
        plots.plain_logs(axes)
        axes.set_xticks(results.grid.workers, map(str, results.grid.workers))
    return figure


# --- the study --------------------------------------------------------------------------------------------------------
def make_runs(groups: GroupRuns, grid: Grid) -> tuple[list[Results], list[dict]]:
    """Search the rates and make all runs; results by steps and target, and the table of rates."""
    tuned = groups.each(partial(tune, groups, grid), grid.groups(), "rates")
    of_all = [
        Results(grid, steps, target, {group: 2.0 ** found["best"][target] for group, found in tuned.items()})
        for steps, target in product(grid.steps, grid.targets)
    ]
    wanted = {
        (results.title, group): at_rate(group.declare(grid, results.steps), rate)
        for results in of_all
        for group, rate in results.rates.items()
    }
    runs = groups.make(wanted, range(grid.seeds))
    for results in of_all:
        results.runs = {group: runs[results.title, group] for group in results.rates}
    return of_all, [row for group, found in tuned.items() for row in rate_rows(group, found)]


def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, tables, plots and claims.")] = Path("runs/scaling"),
    quick: Annotated[bool, typer.Option(help="A small grid that shows how it works, and little else.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    grid = QUICK if quick else Grid()
    with GroupRuns(
        JOB, output, workers, metric="loss", target=min(grid.targets), cluster={"network": NETWORK}
    ) as groups:
        of_all, rates = make_runs(groups, grid)
    study = Study(output)
    remark = f"; {grid.gradients} gradients, {grid.seeds} seeds, means with 95 % confidence"
    for results in of_all:
        study.table(results.title, results.rows(), remark)
    everything = [{"steps and target": title, **row} for title, rows in study.tables.items() for row in rows]
    study.write_csv("table.csv", everything)
    study.write_csv("rates.csv", rates)
    study.claims(paragraphs(claims(of_all)))
    study.draw(figures(of_all))
    runs = [run for results in of_all for of_group in results.runs.values() for run in of_group]
    study.end(runs, rates=rates, grid=vars(grid))


if __name__ == "__main__":
    start(main)
