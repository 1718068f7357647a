"""How staleness, batch and number of learners trade accuracy against time: a systematic study on virtual ranks.

    python jobs/studies/staleness.py        # about 15 minutes on 2 busy cores; --quick: half a minute
    pip install -e '.[tools,plots]'               # what it needs beside the library

After Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a systematic
study", 2016: real training of a real model on real data, with the protocols hardsync, n-softsync and async (n = λ), λ
learners and one server on a virtual cluster, batches of μ per learner. What was chosen, and why:

- Data: scikit-learn's 1,797 digits, half of them for testing, so that a point of error is 9 images; pixels standardised
  by mean and deviation of the training set. A multi-layer perceptron with 32 hidden units: without batch normalisation,
  whose buffers no server averages, and without dropout.
- Budget: every run computes the gradients of the same number of samples, whatever μ, λ and protocol: 16 passes over the
  training set, shuffled together as one epoch, because a learner of the paper does not wait at an epoch's end.
- SGD with momentum β = 0.9 on the server, as in the paper. The rate α₀ is measured: one learner with batch B = 128 runs
  at effective rates α/(1 − β) from 1/8 to 8, on seeds of its own, and the smallest within a point of the best error is
  taken. Not the best, because staleness narrows what is stable: with curvature h a fresh gradient's rate may be up to
  2(1 + β)/h, that of one which is one update old (1 − β)/h, 38 times less. Hardsync uses α₀·√(μλ/B), n-softsync α₀,
  divided by n or by each gradient's staleness where it is modulated.
- Time: a step takes 2 ms and 0.25 ms per sample, so that a batch of 8 costs as much as its overhead; it varies by 20 %
  (gamma-distributed, independent between steps: no learner is always slow). The network: 20 µs, 10 Gbit/s per link. The
  server's arithmetic takes no virtual time.

The folder holds the runs as `hpcdist simulate` leaves them, those that choose α₀ in `tuning`, and `hpcdist report`
makes a page of it. A run that is there is not made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from hpcdist.tools.compare.comparison import FIRST_SEED
from hpcdist.tools.compare.plan import ComparedGroup
from hpcdist.tools.statistics import Interval, interval
from kit import plots
from kit.groups import TUNING, EndedRun, GroupRuns, declare_group
from kit.output import Claim, Study, paragraphs, start
from kit.pairs import difference, ratio

RATES = tuple(2.0**power for power in range(-3, 4))  # α/(1 − β)
TOLERANCE = 1.0  # points of error by which the rate's may be above the best one's
REFERENCE_BATCH = 128  # B: the batch for which the one learner's rate is chosen
MODULATIONS = ("none", "average", "per-gradient")
STEP_MS, SAMPLE_MS = 2, 0.25  # of a step, and of each sample in it
NETWORK = "20us,10Gbit/s"
JOB = Path(__file__).with_name("staleness_job.py")


# --- what is run ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunGroup:
    """One protocol on λ learners with batches of μ. `splits` is the n of n-softsync, 0 is hardsync."""

    splits: int
    modulation: str
    batch: int
    learners: int
    jitter: float = 0.2  # deviation of a step's time over its mean

    @property
    def protocol(self) -> str:
        if self.splits == 0:
            return "hardsync"
        return "async" if self.splits == self.learners > 1 else f"{self.splits}-softsync"

    @property
    def total_batch(self) -> int:
        """Multiply μ by λ."""
        return self.batch * self.learners

    @property
    def expected_staleness(self) -> float:
        """Compute (λ − 1)/c for updates of c = ⌊λ/n⌋ gradients."""
        return 0.0 if self.splits == 0 else (self.learners - 1) / (self.learners // self.splits)

    def declare(self, grid: Grid, rate: float) -> ComparedGroup:
        """Declare the runs.

        Args:
            rate: one learner's; hardsync's grows with the root of its batch, as in the paper.
        """
        strategy: dict[str, Any] = {"name": "hardsync"}
        if self.splits:
            strategy = {"name": "softsync", "splits": self.splits, "modulation": self.modulation}
        own = rate * (self.total_batch / REFERENCE_BATCH) ** 0.5 if self.splits == 0 else rate
        settings = {
            "strategy": {**strategy, "on_nonfinite": "ignore"},  # a run that diverges is measured to its end
            "optimizer": {"name": "SGD", "lr": own, "momentum": grid.momentum},
            "batch_size": self.batch,
        }
        name = f"{self.protocol}, {self.modulation}, batch {self.batch}, jitter {self.jitter:g}"
        compute = f"jitter:{STEP_MS + SAMPLE_MS * self.batch:g}ms,{self.jitter}"
        return declare_group(name, 1 + self.learners, settings, {"compute": compute})


def hardsync(batch: int, learners: int) -> RunGroup:
    return RunGroup(0, "none", batch, learners)


def softsync(splits: int, modulation: str, batch: int, learners: int) -> RunGroup:
    """Make a group; dividing the rate by n = 1 changes nothing, so that this one is the one without modulation."""
    return RunGroup(splits, "none" if splits == 1 and modulation == "average" else modulation, batch, learners)


def one_softsync(batch: int, learners: int) -> RunGroup:
    return softsync(1, "average", batch, learners)


def asynchronous(batch: int, learners: int, modulation: str = "average") -> RunGroup:
    return softsync(learners, modulation, batch, learners)


def even(group: RunGroup) -> RunGroup:
    """Make the same group on learners whose steps all take equally long."""
    return replace(group, jitter=0.0)


PROTOCOLS = {"hardsync": hardsync, "1-softsync": one_softsync, "async": asynchronous}
BASELINE = hardsync(REFERENCE_BATCH, 1)


@dataclass(frozen=True)
class Grid:
    """Three protocols on every batch and number of learners; every n and modulation at one of these; controls."""

    batches: tuple[int, ...] = (4, 8, 16, 32)
    learners: tuple[int, ...] = (4, 8, 16, 32)
    probe: tuple[int, int] = (8, 16)  # μ, λ at which n and the modulation vary
    passes: int = 16
    seeds: int = 5
    momentum: float = 0.9

    @property
    def splits(self) -> list[int]:
        """List each n: powers of two up to λ."""
        return [1 << power for power in range(self.probe[1].bit_length())]

    @property
    def diagonal(self) -> list[tuple[int, int]]:
        """List the (μ, λ) with μλ = B."""
        return [(b, p) for b in self.batches for p in self.learners if b * p == REFERENCE_BATCH]

    def groups(self) -> list[RunGroup]:
        """List all, each once, those of most gradients first."""
        found = [BASELINE]
        for batch in self.batches:
            for learners in self.learners:
                found += [protocol(batch, learners) for protocol in PROTOCOLS.values()]
        found += [softsync(n, modulation, *self.probe) for n in self.splits for modulation in MODULATIONS]
        found += [asynchronous(batch, learners, "none") for batch, learners in self.diagonal]
        found += [even(protocol(self.probe[0], p)) for p in self.learners for protocol in (hardsync, one_softsync)]
        return sorted(dict.fromkeys(found), key=lambda group: group.batch)


QUICK = Grid(batches=(32, 64), learners=(2, 4), probe=(32, 4), passes=2, seeds=2)


# --- the runs and their results ---------------------------------------------------------------------------------------
@dataclass
class Results:
    """The runs of each group, in the order of their seeds."""

    grid: Grid
    rate: float  # α₀
    runs: dict[RunGroup, list[EndedRun]] = field(default_factory=dict)

    def errors(self, group: RunGroup) -> list[float]:
        """List the test errors in per cent."""
        return [percent_wrong(run) for run in self.runs[group]]

    def times_s(self, group: RunGroup) -> list[float]:
        """List the virtual seconds."""
        return [run.summary.wall_s for run in self.runs[group]]

    def error(self, group: RunGroup) -> Interval:
        return interval(self.errors(group))

    def seconds(self, group: RunGroup) -> Interval:
        return interval(self.times_s(group))

    def staleness(self, group: RunGroup) -> Interval:
        return interval([run.summary.staleness.mean for run in self.runs[group]])

    def histogram(self, group: RunGroup) -> dict[int, int]:
        """Count the gradients of each staleness, of all seeds together."""
        total: dict[int, int] = {}
        for made in self.runs[group]:
            for staleness, count in made.summary.staleness.histogram.items():
                total[staleness] = total.get(staleness, 0) + count
        return dict(sorted(total.items()))

    def diverged(self, group: RunGroup) -> int:
        """Count the runs that end with more than half of the test samples wrong."""
        return sum(error > 50 for error in self.errors(group))

    def worse_by(self, group: RunGroup, other: RunGroup) -> Interval:
        """Estimate by how many points the error of `group` is above that of `other`."""
        return difference(self.errors(group), self.errors(other))

    def longer(self, group: RunGroup, other: RunGroup) -> Interval:
        """Estimate how many times the virtual time of `other` a group takes."""
        return ratio(self.times_s(group), self.times_s(other))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Make the table: one row per group."""
        for group in sorted(self.runs, key=lambda c: (c.jitter == 0, c.learners, c.batch, c.splits, c.modulation)):
            yield {
                "protocol": group.protocol,
                "n": group.splits or None,
                "modulation": group.modulation,
                "μ": group.batch,
                "λ": group.learners,
                "μλ": group.total_batch,
                "jitter": f"{group.jitter:.0%}",
                "error %": f"{self.error(group):.2f}",
                "diverged": f"{self.diverged(group)}/{len(self.runs[group])}",
                "virtual s": f"{self.seconds(group):.2f}",
                "staleness": f"{self.staleness(group):.2f}",
                "(λ−1)/c": f"{group.expected_staleness:.2f}",
                "max": max(run.summary.staleness.max for run in self.runs[group]),
            }

    def run_rows(self) -> Iterator[dict[str, Any]]:
        """Make the table of all runs."""
        for group, runs in self.runs.items():
            for run in runs:
                lr, summary = run.settings["optimizer"]["lr"], run.summary
                measured = {"error": percent_wrong(run) / 100, "loss": summary.metrics["loss"]}
                stale = {"staleness_mean": summary.staleness.mean, "staleness_max": summary.staleness.max}
                cost = {"virtual_s": summary.wall_s, "samples": summary.samples}
                yield {**vars(group), "rate": lr, "seed": summary.seed, **measured, **cost, **stale}


def percent_wrong(run: EndedRun) -> float:
    """Return the part of the test samples that are wrong at the end."""
    return 100 * (1 - run.summary.metrics["accuracy"])


def choose_rate(groups: GroupRuns, grid: Grid) -> tuple[float, list[dict]]:
    """Choose α₀; it and the table of errors that it was chosen by."""
    rates, seeds = [rate * (1 - grid.momentum) for rate in RATES], range(FIRST_SEED, FIRST_SEED + grid.seeds)
    runs = groups.make({rate: BASELINE.declare(grid, rate) for rate in rates}, seeds, "one learner", TUNING)
    errors = {rate: interval(list(map(percent_wrong, runs[rate]))) for rate in rates}
    best = min(error.mean for error in errors.values())
    chosen = min(rate for rate, error in errors.items() if error.mean <= best + TOLERANCE)
    rows = [{"rate": rate, "error %": f"{error:.2f}", "": "α₀" * (rate == chosen)} for rate, error in errors.items()]
    return chosen, rows


# --- what the paper claims, held against what was measured ------------------------------------------------------------
CLOSE = 1.0  # points of error that count as no difference
FLAT = 0.25  # part of the spread over μ that the spread along μλ = B may have
LONGER = 1.01  # times as long is what counts as slower
NEAR = 0.15  # relative deviation from (λ − 1)/c that counts as "about"


def claims(results: Results) -> list[Claim]:
    return [claim(results) for claim in (modulation, batches, runtime, staleness)]


def modulation(results: Results) -> Claim:
    batch, learners = results.grid.probe
    reference = hardsync(batch, learners)
    plain, average, each = ([softsync(n, rule, batch, learners) for n in results.grid.splits] for rule in MODULATIONS)
    loss = results.worse_by(plain[-1], reference)
    gap = max(results.worse_by(group, reference).mean for group in average)
    along = [asynchronous(*pair, "none") for pair in results.grid.diagonal]
    return Claim(
        "Without modulation a large n is worse or diverges; divided by n, every n ends where hardsync does.",
        [loss.low > 0, gap <= CLOSE],
        f"At μ = {batch}, λ = {learners} hardsync ends with {results.error(reference):.2f} % of the test samples "
        f"wrong. Without modulation: {_errors(results, plain)}; the largest n is above hardsync by {loss:.2f} points "
        f"(runs of the same seed), an interval that {'excludes' if loss.low > 0 else 'does not exclude'} 0. Async "
        f"without modulation where μλ = {REFERENCE_BATCH}: {_errors(results, along)}. With the rate divided by n: "
        f"{_errors(results, average)}; above hardsync by at most {gap:.2f} points, where up to {CLOSE:g} counts as "
        f"the same. Divided by each gradient's own staleness: {_errors(results, each)}.",
    )


def batches(results: Results) -> Claim:
    grid, parts, sentences = results.grid, [], []
    for name, protocol in PROTOCOLS.items():
        lines = {p: [protocol(batch, p) for batch in grid.batches] for p in grid.learners}
        growth = {p: results.worse_by(groups[-1], groups[0]) for p, groups in lines.items()}
        over_batches = fmean(_spread(results, groups) for groups in lines.values())
        along = [protocol(*pair) for pair in grid.diagonal]
        spread, grows = _spread(results, along), [gain.low > 0 for gain in growth.values()]
        parts += [all(grows), spread <= FLAT * over_batches]
        listed = "; ".join(f"{gain:.2f} at λ = {learners}" for learners, gain in growth.items())
        errors = "; ".join(f"{_error(results, group)} at ({group.batch}, {group.learners})" for group in along)
        sentences.append(
            f"{name}: from μ = {grid.batches[0]} to {grid.batches[-1]} the error grows by {listed} (points), an "
            f"interval above 0 for {sum(grows)} of {len(grows)} λ; at the (μ, λ) with μλ = {REFERENCE_BATCH} it is "
            f"{errors}, a spread of {spread:.2f} points, where up to {FLAT:.0%} of that over μ at fixed λ "
            f"({over_batches:.2f} on average) counts as flat."
        )
    note = "Hardsync is one process with batch μλ, so that its being flat checks the set-up."
    sentence = "At fixed λ the error grows with μ; along μλ = constant it is flat."
    return Claim(sentence, parts, " ".join([*sentences, note]))


def runtime(results: Results) -> Claim:
    grid = results.grid
    every = [(batch, learners) for batch in grid.batches for learners in grid.learners]
    slower = {pair: results.longer(hardsync(*pair), one_softsync(*pair)) for pair in every}
    faster = {pair: results.longer(one_softsync(*pair), asynchronous(*pair)) for pair in every}
    slowest, fastest = ([ratio.low > LONGER for ratio in ratios.values()] for ratios in (slower, faster))
    batch = grid.probe[0]
    jittered = {p: slower[batch, p].mean for p in grid.learners}
    controls = {p: results.longer(even(hardsync(batch, p)), even(one_softsync(batch, p))).mean for p in grid.learners}
    apart = max(abs(ratio.mean - 1) for ratio in faster.values())
    return Claim(
        "Hardsync is slowest under jitter, async fastest.",
        [all(slowest), all(fastest)],
        f"Hardsync takes longer than 1-softsync (by more than {LONGER - 1:.0%}) at {sum(slowest)} of {len(slower)} "
        f"(μ, λ), at μ = {batch} {_times(jittered)}. Not all of that is jitter: with steps that all take equally "
        f"long it is {_times(controls)}, because hardsync's server has all learners to answer at the same moment, "
        f"and does it one after the other. Async is faster than 1-softsync at {sum(fastest)} of {len(faster)} (μ, "
        f"λ); their mean times differ by {apart:.1%} at most. Neither waits for anyone, both move the same messages, "
        "and the virtual server's updates take no time, so that nothing here could make async the faster one.",
    )


def staleness(results: Results) -> Claim:
    batch, learners = results.grid.probe
    stale = [group for group in results.runs if group.splits]
    off = {group: results.staleness(group).mean / group.expected_staleness - 1 for group in stale}
    low, high = min(off, key=off.__getitem__), max(off, key=off.__getitem__)
    beyond = [_share_beyond(results, group) for group in stale]
    listed = "; ".join(
        f"{results.staleness(group):.2f} at n = {group.splits}, where (λ − 1)/c = {group.expected_staleness:.2f} "
        f"(largest {max(results.histogram(group))})"
        for group in (softsync(n, "average", batch, learners) for n in results.grid.splits)
    )
    return Claim(
        "The mean staleness of n-softsync is about n, (λ − 1)/c.",
        [max(map(abs, off.values())) <= NEAR],
        f"At μ = {batch}, λ = {learners}: {listed}. Over all {len(stale)} groups the mean deviates from (λ − 1)/c by "
        f"{off[low]:+.1%} ({_name(low)}) to {off[high]:+.1%} ({_name(high)}), and up to {NEAR:.0%} counts as about. "
        "A run's first gradients are all of the same parameters and its last meet learners that have ended, which "
        "lowers the mean of short runs. The largest part of a group's gradients that are more than 2n updates stale "
        f"is {max(beyond):.2%}.",
    )


def _name(group: RunGroup) -> str:
    return f"{group.protocol} at μ = {group.batch}, λ = {group.learners}"


def _error(results: Results, group: RunGroup) -> str:
    diverged = results.diverged(group)
    return f"{results.error(group):.2f}" + f" ({diverged} of {len(results.runs[group])} diverged)" * bool(diverged)


def _errors(results: Results, groups: Iterable[RunGroup]) -> str:
    return "; ".join(f"{_error(results, group)} at n = {group.splits}" for group in groups)


def _spread(results: Results, groups: Iterable[RunGroup]) -> float:
    """Compute the largest mean error less the smallest."""
    means = [results.error(group).mean for group in groups]
    return max(means) - min(means)


def _times(ratios: dict[int, float]) -> str:
    """List ratios of times by number of learners."""
    return "; ".join(f"{ratio:.2f} times as long at λ = {learners}" for learners, ratio in ratios.items())


def _share_beyond(results: Results, group: RunGroup) -> float:
    """Compute the part of the gradients that are more than 2n updates stale."""
    histogram = results.histogram(group)
    return sum(count for value, count in histogram.items() if value > 2 * group.splits) / sum(histogram.values())


# --- figures ----------------------------------------------------------------------------------------------------------
def figures(results: Results) -> dict[str, Figure]:
    over_batch = errors(results, "μλ", lambda group: group.total_batch)
    for axes in over_batch.axes:
        axes.axvline(REFERENCE_BATCH, **plots.RULE)
    return {
        "error_time": errors(results, "virtual time [s]", lambda group: results.seconds(group).mean),
        "error_batch": over_batch,
        "staleness": histograms(results),
        "modulation": rules(results),
    }


def errors(results: Results, label: str, x: Callable[[RunGroup], float]) -> Figure:
    """Draw test errors, a panel per protocol, a line per number of learners, a point per batch.

    Over μλ: where the lines of all λ lie on one another, only the product matters.
    """
    figure, panels = plots.panels(len(PROTOCOLS), (4, 4), sharex=True, sharey=True)
    for axes, (name, protocol) in zip(panels, PROTOCOLS.items()):
        for marker, learners in zip(plots.MARKERS, results.grid.learners):
            groups = [protocol(batch, learners) for batch in results.grid.batches]
            found = [results.error(group) for group in groups]
            plots.error_bars(axes, [x(group) for group in groups], found, f"λ = {learners}", marker=marker)
        axes.set(xlabel=label, title=name)
        plots.plain_logs(axes)
    panels[0].set_ylabel("test error [%]")
    figure.suptitle(f"along each line batches of {', '.join(map(str, results.grid.batches))} per learner")
    return figure


def histograms(results: Results) -> Figure:
    """Draw how many gradients were how stale, for each n."""
    batch, learners = results.grid.probe
    figure, panels = plots.panels(len(results.grid.splits), (2.6, 3))
    for axes, n in zip(panels, results.grid.splits):
        group = softsync(n, "average", batch, learners)
        histogram = results.histogram(group)
        total = sum(histogram.values())
        axes.bar(list(histogram), [count / total for count in histogram.values()], width=0.9)
        axes.axvline(group.expected_staleness, color="C1", label=f"(λ − 1)/c = {group.expected_staleness:.2f}")
        axes.axvline(2 * n, label=f"2n = {2 * n}", **plots.RULE)
        axes.set(title=group.protocol, xlabel="staleness [updates]")
        axes.legend(fontsize="x-small")
    panels[0].set_ylabel("part of the gradients")
    figure.suptitle(f"μ = {batch}, λ = {learners}")
    return figure


def rules(results: Results) -> Figure:
    """Draw test error against n, for each rule of modulation, beside hardsync."""
    (batch, learners), splits = results.grid.probe, results.grid.splits
    figure, (axes,) = plots.panels(1, (6, 4))
    for marker, rule in zip(plots.MARKERS, MODULATIONS):
        found = [results.error(softsync(n, rule, batch, learners)) for n in splits]
        plots.error_bars(axes, splits, found, f"modulation {rule}", marker=marker)
    axes.axhline(results.error(hardsync(batch, learners)).mean, label="hardsync", color="black", linewidth=0.8)
    axes.set(xlabel="n", ylabel="test error [%]", title=f"n-softsync at μ = {batch}, λ = {learners}")
    plots.plain_logs(axes)
    axes.set_xticks(splits)
    return figure


# --- the study --------------------------------------------------------------------------------------------------------
def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, table, plots and claims.")] = Path("runs/staleness"),
    quick: Annotated[bool, typer.Option(help="A small grid that shows how it works, and little else.")] = False,
    momentum: Annotated[float, typer.Option(min=0, max=0.99, help="Of the server's SGD.")] = 0.9,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    grid = replace(QUICK if quick else Grid(), momentum=momentum)
    settings = {"data": {"path": str(output / f"digits-passes-{grid.passes}.h5")}}
    with GroupRuns(JOB, output, workers, settings=settings, cluster={"network": NETWORK}) as groups:
        rate, rates = choose_rate(groups, grid)
        made = groups.make({group: group.declare(grid, rate) for group in grid.groups()}, range(grid.seeds))
    results, study = Results(grid, rate, made), Study(output)

    study.table("one learner, batch 128", rates)
    budget = f"{grid.passes} passes, {grid.seeds} seeds, momentum {momentum:g}, α₀ = {rate:g}"
    study.write_csv("table.csv", study.table(budget, results.rows(), "; means with 95 % confidence"))
    study.write_csv("runs.csv", list(results.run_rows()))
    study.claims(paragraphs(claims(results)))
    study.draw(figures(results))
    study.end(run for runs in results.runs.values() for run in runs)


if __name__ == "__main__":
    start(main)
