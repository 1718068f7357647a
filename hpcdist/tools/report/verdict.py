"""Say in plain words what the runs show, and what they don't. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hpcdist.tools.machine import remarks
from hpcdist.tools.report import wording
from hpcdist.tools.report.findings import SIGNIFICANT, Cell, Contrast, Findings
from hpcdist.tools.statistics import Effect, geometric, ratio_of


@dataclass(frozen=True)
class Verdict:
    """The answer in a sentence or two, the reasons for it, and what to bear in mind. Names stand in backquotes."""

    headline: str
    reasons: Sequence[str]
    caveats: Sequence[str]


def judge(findings: Findings) -> Verdict:
    """Judge all contrasts, and say so."""
    speaker = _Speaker(findings)
    reasons = [speaker.compare(contrast) for contrast in findings.contrasts]
    reasons = reasons or [speaker.describe(cell) for cell in findings.cells if cell.ended]
    return Verdict(
        speaker.headline(), [*speaker.does_not_pay(), *speaker.first_to_reach(), *reasons], speaker.caveats()
    )


class _Speaker:
    """Write sentences about the cells of one report."""

    def __init__(self, findings: Findings):
        self._findings, self._evidence = findings, findings.evidence
        self._metric, target = self._evidence.metric, self._evidence.target
        self._says_ranks = len({(cell.ranks, cell.virtual) for cell in findings.cells if cell.kind != "serial"}) > 1
        self._target = None if target is None else wording.value(self._metric, target)

    def _of(self, cell: Cell) -> str:
        return f"{'the baseline ' * (cell.kind == 'baseline')}`{cell.shown}`"

    def _on(self, cell: Cell) -> str:
        """Name the cell, and the number of ranks where the report has several."""
        return self._of(cell) + (f" on {wording.count(cell.ranks, 'rank')}" if self._says_ranks else "")

    def _reached(self, cell: Cell) -> str:
        return f"{len(cell.seconds_to_target)} of {wording.count(cell.tried, 'seed')}"

    def _not_finite(self, cell: Cell) -> str:
        return f"{cell.diverged} of {wording.count(len(cell.ended), 'run')}"

    # --- the headline ---------------------------------------------------------------------------------------------
    def headline(self) -> str:
        """Say who wins, or that nobody does."""
        contenders = [contrast for contrast in self._findings.contrasts if contrast.cell.kind != "serial"]
        found: dict[str, list[Contrast]] = {}
        for contrast in contenders:
            found.setdefault(contrast.standing, []).append(contrast)
        reference = f"`{self._evidence.reference}`"
        if not any(cell.ended for cell in self._findings.cells):
            return "No run has ended: there is nothing to judge yet."
        if not contenders:
            return f"There is nothing to compare: no runs beside those of {reference} on as many ranks."
        if wins := found.get("wins"):
            return self._winners(wins) + (f" {self._trades(mixed)}" if (mixed := found.get("mixed")) else "")
        if len(found.get("unknown", ())) == len(contenders):
            return self._unknown(contenders)
        if mixed := found.get("mixed"):
            return f"It depends: {self._trades(mixed)}"
        some = " Some could not be tested: see below." if "unknown" in found else ""
        if loses := found.get("loses"):
            many = "all" if len(loses) == len(contenders) else f"{len(loses)} of {len(contenders)}"
            bests = {contrast.reference.label: contrast.reference for contrast in contenders}.values()
            best = wording.joined([f"{self._on(cell)} ({self._ends(cell)})" for cell in bests])
            return f"Nothing beats {best}: {many} of what was held against it did worse, beyond noise.{some}"
        tested = ["time"] if any(not math.isnan(contrast.p_sooner) for contrast in contenders) else []
        tested += [self._metric] if any(not math.isnan(contrast.p_better) for contrast in contenders) else []
        return f"Nothing differs from {reference} beyond noise, in {' or in '.join(tested)}.{some}"

    def _winners(self, wins: Sequence[Contrast]) -> str:
        best = max(wins, key=lambda c: (c.cell.ranks, c.p_sooner < SIGNIFICANT, c.sooner.mean if c.sooner else 0.0))
        first = self.compare(best)
        if best.cell.kind == "baseline":
            first = f"A baseline wins: {first[0].lower()}{first[1:]}"
        others = {c.cell.name: c.cell for c in reversed(wins) if c.cell.name != best.cell.name}
        if not others:
            return first
        names = wording.joined([f"{self._on(cell)} ({self._ends(cell)})" for cell in others.values()])
        return (
            f"{first} {wording.capital(names)} beat{'s' * (len(others) == 1)} `{best.reference.name}`, too; winners "
            "were not tested against each other."
        )

    def _trades(self, mixed: Sequence[Contrast]) -> str:
        """Say of cells that were better in one and worse in the other: both."""
        said = []
        for contrast in mixed:
            cell, other, found = contrast.cell, contrast.reference, contrast.sooner
            how = "faster, but worse" if found is not None and found.mean > 1 else "slower, but better"
            said.append(f"{self._on(cell)} was {how} than {self._of(other)} ({self._ends(cell, other)})")
        return f"{wording.capital(wording.joined(said))}, beyond noise both ways."

    def _unknown(self, contenders: Sequence[Contrast]) -> str:
        if any(len(c.cell.ended) > 1 for c in contenders):
            return "The runs that ended do not suffice to test anything: see below."
        text = "Each has one seed, which shows nothing about noise, so that nothing here is a result."
        virtual = contenders[0].cell.virtual  # seconds of other clocks can't be compared with theirs
        cells = [cell for cell in self._findings.cells if cell.virtual == virtual and cell.final]
        fastest = min(cells, key=_mean_seconds, default=None)
        if fastest is None or math.isinf(_mean_seconds(fastest)):
            return text
        sign = 1 if self._evidence.higher_is_better else -1
        best = max(cells, key=lambda cell: sign * fmean(cell.final.values()))
        text += f" In this seed {self._on(fastest)} was the fastest ({self._ends(fastest)})"
        if sign * fmean(best.final.values()) > sign * fmean(fastest.final.values()):
            text += f", {self._on(best)} the best in {self._metric} ({self._ends(best)})"
        return f"{text}: see below."

    # --- one rank or several --------------------------------------------------------------------------------------
    def does_not_pay(self) -> list[str]:
        """Say which cells were slower, beyond noise, than one process with the same batch as all workers together."""
        rows = [row for row in self._findings.scaling if row.kind == "strong" and row.speedup.high < 1]
        said = []
        for row in rows:
            how, ratio = _times_sooner(row.speedup)
            on, than = wording.count(row.cell.ranks, "rank"), self._of(row.base)
            text = f"{self._of(row.cell)} on {on} trained on as many samples {how} than {than}{_within(ratio)}"
            said.append(f"{text}; {self._ends(row.cell, row.base)}")
        return [f"Distributing did not pay against one process with the same batch: {'. '.join(said)}."] if said else []

    def first_to_reach(self) -> list[str]:
        """Say which cell was the first of all to reach the target; hold several ranks against one."""
        said = []
        for virtual in dict.fromkeys(cell.virtual for cell in self._findings.cells):  # each by its own clock
            cells = [cell for cell in self._findings.cells if cell.virtual == virtual and cell.tried]
            first = min(cells, key=_mean_seconds, default=None)
            if first is None or not first.all_reached:
                continue
            others = [cell for cell in cells if (cell.ranks > 1) != (first.ranks > 1)]
            if others:
                said.append(self._first(first, min(others, key=lambda one: (_mean_seconds(one), -_part_reached(one)))))
        return said

    def _first(self, first: Cell, other: Cell) -> str:
        """Say that a cell was the first of all, and how long the first on several ranks, or on one, took."""
        who = wording.capital(f"{self._of(first)} on {wording.count(first.ranks, 'rank')}")
        text = f"{who} was the first of all to reach {self._target}"
        on = "one rank" if other.ranks == 1 else wording.count(other.ranks, "rank")
        if not other.all_reached:
            text += f" ({self._ends(first)})"
            return f"{text}; on {on}, {self._of(other)}, {self._reached(other)} did ({self._ends(other)})."
        how, ratio = _times_sooner(ratio_of(other.seconds_to_target, first.seconds_to_target))
        return f"{text}: {how} than {on}, {self._of(other)}{_within(ratio)}; {self._ends(first, other)}."

    def _ends(self, *cells: Cell) -> str:
        """Write the mean of the metric at the end of each of these cells."""
        finals = [one.final_mean for one in cells]
        means = ["no finite value" if one is None else wording.value(self._metric, one.mean) for one in finals]
        return f"final {self._metric} {' against '.join(means)}"

    # --- one cell, or two -----------------------------------------------------------------------------------------
    def describe(self, cell: Cell) -> str:
        """Describe a cell that nothing is compared with."""
        end = f"final {self._metric} {wording.mean(self._metric, cell.final_mean)}" if cell.final else "no final value"
        reached = f"; {self._reached(cell)} reached {self._target}" if self._target else ""
        if cell.seconds_to_target:
            seconds = wording.seconds_to_target(cell.seconds_to_target.values(), cell.tried)
            reached += f", seconds to it: {seconds}{', geometric mean' * cell.all_reached}"
        return f"{self._on(cell)}: {end}{reached} ({wording.count(len(cell.ended), 'run')})."

    def compare(self, contrast: Contrast) -> str:
        """Say how a cell compares with the reference: time and metric, never one without the other."""
        cell, other = contrast.cell, contrast.reference
        if lost := [side for side in (cell, other) if not side.ended]:
            return f"{wording.capital(self._on(lost[0]))} has no run that ended: nothing can be compared."
        metric = self._compare_metrics(contrast)
        if cell.kind == "serial":
            return f"One process with the same total batch, `{cell.shown}`, against {self._on(other)}: {metric}."
        text = f"{self._compare_times(contrast)}; {metric}."
        return f"On {wording.count(cell.ranks, 'rank')} {text}" if self._says_ranks else wording.capital(text)

    def _compare_times(self, contrast: Contrast) -> str:
        cell, other, found = contrast.cell, contrast.reference, contrast.sooner
        one, two = self._of(cell), self._of(other)
        done = f"reached {self._target}" if self._target else "trained on as many samples"
        if found is None and not self._target:
            return f"{one} against {two}: no ratio of times, because {contrast.why}"
        if found is None:
            if not cell.seconds_to_target and not other.seconds_to_target:
                return f"neither {one} nor {two} {done}, in any seed"
            counts = "; ".join(f"{self._of(side)}: {self._reached(side)} {done}" for side in (cell, other))
            return f"{counts}. No ratio of times is given: {contrast.why}"
        how, ratio = _times_sooner(found)
        if math.isnan(found.p):
            return f"{one} {done} {how} than {two}, in one seed, which shows nothing about noise"
        within = f"95 % interval {ratio.low:.3g} to {ratio.high:.3g}"
        if contrast.p_sooner < SIGNIFICANT:
            return f"{one} {done} {how} than {two} ({within})"
        within += _correction(found.p, contrast.p_sooner)
        return f"{one} {done} neither sooner nor later than {two} beyond noise ({how}, {within})"

    def _compare_metrics(self, contrast: Contrast) -> str:
        sides, found, metric = (contrast.cell, contrast.reference), contrast.better, self._metric
        if found is None:
            bad = [f"{self._not_finite(side)} of {self._of(side)} ended with no finite value"
                   for side in sides if side.diverged]  # fmt: skip
            why = "; ".join(bad) or "a side has no run that ended with one"
            return f"the final {metric} can't be compared: {why}"
        ends = [wording.value(metric, side.final_mean.mean) for side in sides if side.final_mean]
        if contrast.same:
            return f"the final {metric} is the same, {ends[0]}, seed by seed"
        both, unit = " against ".join(ends), wording.gap_unit(metric)
        if math.isnan(found.p):
            return f"its final {metric} is {both}"
        within = f"95 % interval of the difference {wording.gap_span(metric, found)}{unit}"
        if contrast.p_better < SIGNIFICANT:
            more = "higher" if found.mean > 0 else "lower"
            size = wording.gap(metric, abs(found.mean), sign=False)
            return f"the final {metric} is {size}{unit} {more} ({both}; {within})"
        within += _correction(found.p, contrast.p_better)
        return f"the difference in final {metric} is within noise ({both}; {within})"

    # --- what to bear in mind -------------------------------------------------------------------------------------
    def caveats(self) -> list[str]:
        """List all that limits the verdict."""
        cells, evidence, failed = self._findings.cells, self._evidence, self._findings.failures
        found = []
        if virtual := sum(cell.virtual for cell in cells):
            which = "All runs" if virtual == len(cells) else f"{virtual} of {len(cells)} kinds of runs"
            found.append(f"{which} are of virtual ranks: their seconds are virtual, and none was measured by a clock.")
        found += self._machine()
        if single := sum(len(cell.ended) == 1 for cell in cells):
            which = "Every kind of run has" if single == len(cells) else f"{single} of {len(cells)} kinds of runs have"
            found.append(f"{which} one seed, which shows nothing about noise: there is no interval.")
        short = [cell for cell in cells if self._target and not cell.all_reached and cell.ended]
        found += [f"{self._on(cell)}: {self._reached(cell)} reached {self._target}."
                  for cell in short if cell.seconds_to_target]  # fmt: skip
        if none := [self._on(cell) for cell in short if not cell.seconds_to_target]:
            found.append(f"No run reached {self._target} of {', '.join(none)}.")
        found += [f"{self._on(cell)}: {self._not_finite(cell)} ended with no finite {self._metric}."
                  for cell in cells if cell.diverged]  # fmt: skip
        found += [f"`{one.run.folder}` was resumed with other settings, and stands alone: {'; '.join(one.run.changes)}."
                  for one in evidence.runs if one.run.ended and one.run.changes]  # fmt: skip
        if failed:
            found.append(f"{wording.count(len(failed), 'run')} without a result: listed below, and in no number.")
        if self._target is None:
            found.append(
                f"No target was set, so that times are those for as many samples, not for as good a model; "
                f"`--target {self._metric}=VALUE` sets one."
            )
        else:
            found.append("The time to the target is that of the first evaluation that met it: it is rounded up.")
        found += self._room()
        tests = sum(not math.isnan(p) for c in self._findings.contrasts for p in (c.p_sooner, c.p_better))
        if tests > 1:
            found.append(
                f"{tests} comparisons were made. Differences count as real where p is below {SIGNIFICANT:g} after "
                "Holm's correction for all of them; intervals are each one's own."
            )
        if evidence.tuning:
            found.append("Rates were tuned before, on seeds of their own, which are in no number here.")
        return found

    def _machine(self) -> list[str]:
        """Say that ranks shared cores, or that the machine was busy, for each host where that was so."""
        real = [one for one in self._evidence.runs if not one.virtual and one.run.start and one.run.start.cores]
        starts = [one.run.start for one in real if one.run.start]
        ranks = {host: max(start.hosts.count(host) for start in starts) for start in starts for host in start.cores}
        found = []
        for host, most in ranks.items():
            here = [start for start in starts if host in start.cores]
            cores = min(start.cores[host] for start in here if start.hosts.count(host) == most)
            loads = [load for start in here if start.hosts[0] == host for load in start.load]
            processors = max((start.processors or 0 for start in here if start.hosts[0] == host), default=0)
            found += [f"{host}: {text}" for text in remarks(most, cores, processors, max(loads, default=0.0))]
        return found

    def _room(self) -> list[str]:
        """Say how large differences may be that were called noise."""
        contrasts = [contrast for contrast in self._findings.contrasts if contrast.cell.kind != "serial"]
        times = [c.sooner for c in contrasts if c.sooner is not None and not c.p_sooner < SIGNIFICANT]
        gaps = [c.better for c in contrasts if c.better is not None and not c.p_better < SIGNIFICANT]
        factor = max((max(one.high, 1 / one.low) for one in times if one.low < one.high), default=0.0)
        gap = max((max(one.high, -one.low) for one in gaps if one.low < one.high), default=0.0)
        room = [f"a factor of {factor:.3g} in time"] if factor else []
        if gap:
            size = wording.gap(self._metric, gap, sign=False) + wording.gap_unit(self._metric)
            room.append(f"{size} of {self._metric}")
        if not room:
            return []
        return [
            f"Within noise does not mean alike: intervals leave room for {' and '.join(room)}. More seeds narrow them."
        ]


def _mean_seconds(cell: Cell) -> float:
    """Return the geometric mean of the seconds to the target, or without one of those of a sample; else infinity."""
    if cell.evidence.target is None:
        return geometric(list(found)).geometric_mean if (found := cell.seconds_per_sample.values()) else math.inf
    mean = cell.mean_seconds_to_target
    return math.inf if mean is None else mean.geometric_mean


def _part_reached(cell: Cell) -> float:
    return len(cell.seconds_to_target) / cell.tried


def _within(ratio: Effect) -> str:
    """Write the interval of a ratio, where it is known; say so where that leaves room for no difference."""
    noise = "within noise: " * (ratio.low <= 1 <= ratio.high)
    return "" if math.isnan(ratio.low) else f" ({noise}95 % interval {ratio.low:.3g} to {ratio.high:.3g})"


def _times_sooner(found: Effect) -> tuple[str, Effect]:
    """Write a ratio as so many times sooner, or later; return it so, too."""
    if found.mean >= 1:
        return f"{found.mean:.3g} times sooner", found
    later = Effect(1 / found.mean, 1 / found.high, 1 / found.low, found.p, found.paired)
    return f"{later.mean:.3g} times later", later


def _correction(p: float, corrected: float) -> str:
    """Name the correction where it alone makes the difference."""
    return "; not enough once corrected for the number of comparisons" if p < SIGNIFICANT <= corrected else ""
