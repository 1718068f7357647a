"""Say in plain words what the runs show, and what they don't. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from hpcdist.tools.report import wording
from hpcdist.tools.report.findings import SIGNIFICANT, Cell, Contrast, Findings, is_alone
from hpcdist.tools.statistics import Effect, ratio_of


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
    return Verdict(speaker.headline(), [*speaker.first_to_reach(), *reasons], speaker.caveats())


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
            return self._winners(wins)
        if len(found.get("unknown", ())) == len(contenders):
            return self._unknown(contenders)
        if mixed := found.get("mixed"):
            names = wording.listed([contrast.cell.name for contrast in mixed])
            return f"It depends: {names} traded time for {self._metric} against {reference}, beyond noise both ways."
        some = " Some could not be tested: see below." if "unknown" in found else ""
        if loses := found.get("loses"):
            baseline = "the baseline " * any(contrast.reference.kind == "baseline" for contrast in contenders)
            many = "all" if len(loses) == len(contenders) else f"{len(loses)} of {len(contenders)}"
            best = f"{baseline}{reference}"
            return f"Nothing beats {best}: {many} of what was held against it did worse, beyond noise.{some}"
        tested = ["time"] if any(not math.isnan(contrast.p_sooner) for contrast in contenders) else []
        tested += [self._metric] if any(not math.isnan(contrast.p_better) for contrast in contenders) else []
        return f"Nothing differs from {reference} beyond noise, in {' or in '.join(tested)}.{some}"

    def _winners(self, wins: Sequence[Contrast]) -> str:
        best = max(wins, key=lambda c: (c.cell.ranks, c.p_sooner < SIGNIFICANT, c.sooner.mean if c.sooner else 0.0))
        first = self.compare(best)
        if best.cell.kind == "baseline":
            first = f"A baseline wins: {first[0].lower()}{first[1:]}"
        others = list(dict.fromkeys(c.cell.name for c in wins if c.cell.name != best.cell.name))
        if not others:
            return first
        return (
            f"{first} {wording.listed(others)} beat{'s' * (len(others) == 1)} `{best.reference.name}`, too; winners "
            "were not tested against each other."
        )

    def _unknown(self, contenders: Sequence[Contrast]) -> str:
        if any(len(c.cell.ended) > 1 for c in contenders):
            return "The runs that ended do not suffice to test anything: see below."
        text = "Each has one seed, which shows nothing about noise, so that nothing here is a result."
        timed = [(contrast.sooner.mean, contrast) for contrast in contenders if contrast.sooner is not None]
        if not timed:
            return text
        times, best = max(timed, key=lambda one: one[0])
        fastest = self._on(best.cell if times > 1 else best.reference)
        return f"{text} In this seed {fastest} was the fastest: see below."

    # --- one rank or several --------------------------------------------------------------------------------------
    def first_to_reach(self) -> list[str]:
        """Say which cell on several ranks was the first to reach the target, and how long one rank took."""
        several = [cell for cell in self._findings.cells if cell.ranks > 1 and cell.all_reached]
        if not several:
            return []
        cell = min(several, key=_mean_seconds)
        batch = (cell.total_batch or 0) // cell.workers
        alone = [other for other in self._findings.cells if is_alone(other, cell, batch)]
        if not alone:
            return []
        base = min(alone, key=lambda one: _mean_seconds(one) if one.all_reached else math.inf)
        who = wording.capital(f"{self._of(cell)} on {wording.count(cell.ranks, 'rank')}")
        text = f"{who} was the first of all to reach {self._target}"
        if not base.all_reached:
            return [f"{text}; on one rank, {self._of(base)}, {self._reached(base)} did."]
        how, ratio = _times_sooner(ratio_of(base.seconds_to_target, cell.seconds_to_target))
        within = "" if math.isnan(ratio.low) else f" (95 % interval {ratio.low:.3g} to {ratio.high:.3g})"
        ends = " against ".join(
            wording.mean(self._metric, side.final_mean) if side.final else "no finite value" for side in (cell, base)
        )
        return [f"{text}: {how} than one rank, {self._of(base)}{within}; final {self._metric} {ends}."]

    # --- one cell, or two -----------------------------------------------------------------------------------------
    def describe(self, cell: Cell) -> str:
        """Describe a cell that nothing is compared with."""
        end = f"final {self._metric} {wording.mean(self._metric, cell.final_mean)}" if cell.final else "no final value"
        reached = f"; {self._reached(cell)} reached {self._target}" if self._target else ""
        reached += f", on average after {wording.seconds(_mean_seconds(cell))}" if cell.seconds_to_target else ""
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
            which = "All runs" if virtual == len(cells) else f"{virtual} of {len(cells)} cells"
            found.append(f"{which} are of virtual ranks: their seconds are virtual, and none was measured by a clock.")
        if single := sum(len(cell.ended) == 1 for cell in cells):
            which = "Every cell has" if single == len(cells) else f"{single} of {len(cells)} cells have"
            found.append(f"{which} one seed, which shows nothing about noise: there is no interval.")
        short = [cell for cell in cells if self._target and not cell.all_reached and cell.ended]
        found += [f"{self._on(cell)}: {self._reached(cell)} reached {self._target}."
                  for cell in short if cell.seconds_to_target]  # fmt: skip
        if none := [self._on(cell) for cell in short if not cell.seconds_to_target]:
            found.append(f"No run reached {self._target} of {', '.join(none)}.")
        found += [f"{self._on(cell)}: {self._not_finite(cell)} ended with no finite {self._metric}."
                  for cell in cells if cell.diverged]  # fmt: skip
        job = next((cell.job for cell in cells if cell.name == evidence.reference), None)
        if others := sorted({cell.job for cell in cells if cell.job is not None} - {job}):
            found.append(f"Runs of other jobs than {job} are compared with nothing: {', '.join(others)}.")
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
    """Return the geometric mean of the seconds to the target, as ratios of times are of logarithms."""
    return geometric_mean(cell.seconds_to_target.values())


def _times_sooner(found: Effect) -> tuple[str, Effect]:
    """Write a ratio as so many times sooner, or later; return it so, too."""
    if found.mean >= 1:
        return f"{found.mean:.3g} times sooner", found
    later = Effect(1 / found.mean, 1 / found.high, 1 / found.low, found.p, found.paired)
    return f"{later.mean:.3g} times later", later


def _correction(p: float, corrected: float) -> str:
    """Name the correction where it alone makes the difference."""
    return "; not enough once corrected for the number of comparisons" if p < SIGNIFICANT <= corrected else ""
