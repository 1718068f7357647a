"""Say in plain words what the runs show, and what they don't. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import SIGNIFICANT, CellEvidence, Contrast, Findings
from hpcdist.tools.statistics import Effect, interval, ratio_of


@dataclass(frozen=True)
class Verdict:
    """The answer in a sentence or two, the reasons for it, and what to bear in mind. Names stand in backquotes."""

    headline: str
    reasons: Sequence[str]
    caveats: Sequence[str]


def judge(findings: Findings) -> Verdict:
    """Judge all contrasts, and say so."""
    speaker = _Speaker(findings)
    contrasts = findings.contrasts
    reasons = [speaker.sentence(contrast) for contrast in contrasts]
    reasons = reasons or [speaker.alone(cell) for cell in findings.cells if cell.ended]
    return Verdict(speaker.headline(contrasts), [*speaker.first(), *reasons], speaker.caveats())


def standing(contrast: Contrast, higher_is_better: bool) -> str:
    """Tell whether a cell `wins`, `loses`, is `mixed` (sooner and worse, or later and better), `alike` or `unknown`."""
    signs = {
        side
        for effect, p, side in (
            (contrast.sooner, contrast.p_sooner, contrast.sooner and contrast.sooner.mean > 1),
            (contrast.better, contrast.p_better, contrast.better and (contrast.better.mean > 0) == higher_is_better),
        )
        if effect is not None and p < SIGNIFICANT
    }
    if len(signs) == 2:
        return "mixed"
    if signs:
        return "wins" if True in signs else "loses"
    known = [p for p in (contrast.p_sooner, contrast.p_better) if not math.isnan(p)]
    return "alike" if known else "unknown"


class _Speaker:
    """Write sentences about the cells of one report."""

    def __init__(self, findings: Findings):
        self._findings, self._evidence = findings, findings.evidence
        self._metric, self._higher = self._evidence.metric, self._evidence.higher_is_better
        names = {(cell.ranks, cell.virtual) for cell in findings.cells if cell.kind != "serial"}
        self._says_ranks = len(names) > 1
        self._job = next((cell.job for cell in findings.cells if cell.name == self._evidence.reference), None)
        target = self._evidence.target
        self._target = None if target is None else wording.value(self._metric, target)

    def _of(self, cell: CellEvidence) -> str:
        kind = "the baseline " if cell.kind == "baseline" else ""
        return f"{kind}`{cell.shown}`"

    def _on(self, cell: CellEvidence) -> str:
        """Name the number of ranks, where there are several."""
        return f" on {wording.count(cell.ranks, 'rank')}" if self._says_ranks else ""

    # --- the headline ---------------------------------------------------------------------------------------------
    def headline(self, contrasts: Sequence[Contrast]) -> str:
        """Say who wins, or that nobody does."""
        contenders = [contrast for contrast in contrasts if contrast.cell.kind != "serial"]
        found: dict[str, list[Contrast]] = {}
        for contrast in contenders:
            found.setdefault(standing(contrast, self._higher), []).append(contrast)
        reference = f"`{self._evidence.reference}`"
        if not any(cell.ended for cell in self._findings.cells):
            return "No run has ended: there is nothing to judge yet."
        if not contenders:
            return f"There is nothing to compare: no runs beside those of {reference} on as many ranks."
        if wins := found.get("wins"):
            return self._winners(wins)
        if len(found.get("unknown", ())) == len(contenders):
            return self._unknown(contenders)
        if "mixed" in found:
            names = wording.listed(list(dict.fromkeys(contrast.cell.name for contrast in found["mixed"])))
            return f"It depends: {names} traded time for {self._metric} against {reference}, beyond noise both ways."
        some = " Some could not be tested: see below." if "unknown" in found else ""
        if loses := found.get("loses"):
            is_baseline = any(contrast.reference.kind == "baseline" for contrast in contenders)
            nothing = f"Nothing beats {'the baseline ' if is_baseline else ''}{reference}"
            many = "all" if len(loses) == len(contenders) else f"{len(loses)} of {len(contenders)}"
            return f"{nothing}: {many} of what was held against it did worse, beyond noise.{some}"
        tested = ["time"] if any(not math.isnan(contrast.p_sooner) for contrast in contenders) else []
        tested += [self._metric] if any(not math.isnan(contrast.p_better) for contrast in contenders) else []
        return f"Nothing differs from {reference} beyond noise, in {' or in '.join(tested)}.{some}"

    def _winners(self, wins: Sequence[Contrast]) -> str:
        best = max(wins, key=lambda c: (c.cell.ranks, c.p_sooner < SIGNIFICANT, c.sooner.mean if c.sooner else 0.0))
        first = self.sentence(best)
        if best.cell.kind == "baseline":
            first = f"A baseline wins: {first[0].lower()}{first[1:]}"
        others = list(dict.fromkeys(c.cell.name for c in wins if c.cell.name != best.cell.name))
        if others:
            first += (
                f" {wording.listed(others)} beat{'s' * (len(others) == 1)} `{best.reference.name}`, too; winners were "
                "not tested against each other."
            )
        return first

    def _unknown(self, contenders: Sequence[Contrast]) -> str:
        timed = [contrast for contrast in contenders if contrast.sooner is not None]
        if any(len(c.cell.ended) > 1 for c in contenders):
            return "The runs that ended do not suffice to test anything: see below."
        text = "Each has one seed, which shows nothing about noise, so that nothing here is a result."
        if timed:
            best = max(timed, key=lambda contrast: contrast.sooner.mean)
            shown = best.cell if best.sooner.mean > 1 else best.reference
            text += f" In this seed {self._of(shown)}{self._on(shown)} was the fastest: see below."
        return text

    # --- one rank or several --------------------------------------------------------------------------------------
    def first(self) -> list[str]:
        """Say which cell on several ranks was the first to reach the target, and how long one rank took."""
        several = [cell for cell in self._findings.cells if cell.ranks > 1 and cell.all_reached]
        if not several:
            return []
        cell = min(several, key=lambda one: geometric_mean(one.seconds_to_target.values()))
        alone = [other for other in self._findings.cells if _is_one_rank_of(cell, other)]
        if not alone:
            return []
        base = min(
            alone, key=lambda one: geometric_mean(one.seconds_to_target.values()) if one.all_reached else math.inf
        )
        who = f"{self._of(cell)} on {wording.count(cell.ranks, 'rank')}"
        text = f"{who[0].upper()}{who[1:]} was the first of all to reach {self._target}"
        if not base.all_reached:
            return [f"{text}; on one rank, {self._of(base)}, {self._reached(base)} did."]
        how, ratio = _times_sooner(ratio_of(base.seconds_to_target, cell.seconds_to_target))
        within = "" if math.isnan(ratio.low) else f" (95 % interval {ratio.low:.3g} to {ratio.high:.3g})"
        ends = " against ".join(
            wording.mean(self._metric, interval(list(side.final.values()))) if side.final else "no finite value"
            for side in (cell, base)
        )
        return [f"{text}: {how} than one rank, {self._of(base)}{within}; final {self._metric} {ends}."]

    # --- a contrast -----------------------------------------------------------------------------------------------
    def sentence(self, contrast: Contrast) -> str:
        """Say how a cell compares with the reference: time and metric, never one without the other."""
        cell, other = contrast.cell, contrast.reference
        if lost := [side for side in (cell, other) if not side.ended]:
            who = f"{self._of(lost[0])}{self._on(lost[0])}"
            return f"{who[0].upper()}{who[1:]} has no run that ended: nothing can be compared."
        metric = self._metric_part(contrast)
        if cell.kind == "serial":
            name = f"One process with the same total batch, `{cell.shown}`, against {self._of(other)}{self._on(other)}"
            return f"{name}: {metric}."
        text = f"{self._time_part(contrast)}; {metric}."
        return f"On {wording.count(cell.ranks, 'rank')} {text}" if self._says_ranks else text[0].upper() + text[1:]

    def _time_part(self, contrast: Contrast) -> str:
        cell, other = contrast.cell, contrast.reference
        one, two, found = self._of(cell), self._of(other), contrast.sooner
        done = f"reached {self._target}" if self._target else "trained on as many samples"
        if found is None:
            if self._target and cell.ended and other.ended:
                if not cell.seconds_to_target and not other.seconds_to_target:
                    return f"neither {one} nor {two} {done}, in any seed"
                counts = (f"{self._reached(side)} {done}" for side in (cell, other))
                return f"{one}: {next(counts)}; {two}: {next(counts)}. No ratio of times is given: {contrast.why}"
            return f"{one} against {two}: no ratio of times, because {contrast.why}"
        how, ratio = _times_sooner(found)
        if math.isnan(found.p):
            return f"{one} {done} {how} than {two}, in one seed, which shows nothing about noise"
        within = f"95 % interval {ratio.low:.3g} to {ratio.high:.3g}"
        if contrast.p_sooner < SIGNIFICANT:
            return f"{one} {done} {how} than {two} ({within})"
        within += self._correction(found.p, contrast.p_sooner)
        return f"{one} {done} neither sooner nor later than {two} beyond noise ({how}, {within})"

    def _metric_part(self, contrast: Contrast) -> str:
        cell, other, found, metric = contrast.cell, contrast.reference, contrast.better, self._metric
        if found is None:
            return f"the final {metric} can't be compared: {self._why_no_metric(contrast)}"
        ends = [interval(list(side.final.values())).mean for side in (cell, other)]
        both = " against ".join(wording.value(metric, value) for value in ends)
        if contrast.same:
            return f"the final {metric} is the same, {wording.value(metric, ends[0])}, seed by seed"
        unit = wording.gap_unit(metric)
        if math.isnan(found.p):
            return f"its final {metric} is {both}"
        within = f"95 % interval of the difference {_span(metric, found)}{unit}"
        if contrast.p_better < SIGNIFICANT:
            more = "higher" if found.mean > 0 else "lower"
            size = wording.gap(metric, abs(found.mean), sign=False)
            return f"the final {metric} is {size}{unit} {more} ({both}; {within})"
        within += self._correction(found.p, contrast.p_better)
        return f"the difference in final {metric} is within noise ({both}; {within})"

    def _correction(self, p: float, corrected: float) -> str:
        """Name the correction where it alone makes the difference."""
        return "; not enough once corrected for the number of comparisons" if p < SIGNIFICANT <= corrected else ""

    def _why_no_metric(self, contrast: Contrast) -> str:
        sides = (contrast.cell, contrast.reference)
        bad = [
            f"{side.diverged} of {wording.count(len(side.ended), 'run')} of {self._of(side)} ended with no finite value"
            for side in sides
            if side.diverged
        ]
        return "; ".join(bad) or "a side has no run that ended with one"

    def _reached(self, cell: CellEvidence) -> str:
        return f"{len(cell.seconds_to_target)} of {wording.count(cell.tried, 'seed')}"

    def alone(self, cell: CellEvidence) -> str:
        """Say what came of a cell that nothing is compared with."""
        values = list(cell.final.values())
        end = f"final {self._metric} {wording.mean(self._metric, interval(values))}" if values else "no final value"
        seconds = list(cell.seconds_to_target.values())
        reached = f"; {self._reached(cell)} reached {self._target}" if self._target else ""
        reached += f", on average after {wording.seconds(geometric_mean(seconds))}" if seconds else ""
        return f"{self._of(cell)}{self._on(cell)}: {end}{reached} ({wording.count(len(cell.ended), 'run')})."

    # --- what to bear in mind -------------------------------------------------------------------------------------
    def caveats(self) -> list[str]:
        """List all that limits the verdict."""
        cells, evidence, failed = self._findings.cells, self._evidence, self._findings.failures
        found = []
        virtual = [cell for cell in cells if cell.virtual]
        if virtual:
            which = "All runs" if len(virtual) == len(cells) else f"{len(virtual)} of {len(cells)} cells"
            found.append(f"{which} are of virtual ranks: their seconds are virtual, and none was measured by a clock.")
        single = [cell for cell in cells if len(cell.ended) == 1]
        if single:
            which = "Every cell has" if len(single) == len(cells) else f"{len(single)} of {len(cells)} cells have"
            found.append(f"{which} one seed, which shows nothing about noise: there is no interval.")
        short = [cell for cell in cells if self._target and not cell.all_reached and cell.ended]
        some = [cell for cell in short if cell.seconds_to_target]
        found += [f"{self._of(cell)}{self._on(cell)}: {self._reached(cell)} reached {self._target}." for cell in some]
        none = [f"{self._of(cell)}{self._on(cell)}" for cell in short if not cell.seconds_to_target]
        found += [f"No run reached {self._target} of {', '.join(none)}."] if none else []
        found += [
            f"{self._of(cell)}{self._on(cell)}: {cell.diverged} of {wording.count(len(cell.ended), 'run')} ended with "
            f"no finite {self._metric}."
            for cell in cells
            if cell.diverged
        ]
        others = sorted({cell.job for cell in cells if cell.job is not None} - {self._job})
        if others:
            found.append(f"Runs of other jobs than {self._job} are compared with nothing: {', '.join(others)}.")
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
            room.append(
                f"{wording.gap(self._metric, gap, sign=False)}{wording.gap_unit(self._metric)} of {self._metric}"
            )
        if not room:
            return []
        return [
            f"Within noise does not mean alike: intervals leave room for {' and '.join(room)}. More seeds narrow them."
        ]


def _is_one_rank_of(cell: CellEvidence, other: CellEvidence) -> bool:
    """Tell whether a cell is of one rank, with the batch that each worker of `cell` has."""
    if other.ranks > 1 or other.kind == "baseline" or (other.virtual, other.job) != (cell.virtual, cell.job):
        return False
    workers = next(iter(cell.ended.values())).summary.workers
    return other.total_batch is not None and other.total_batch * workers == cell.total_batch


def _times_sooner(found: Effect) -> tuple[str, Effect]:
    """Write a ratio as so many times sooner, or later; return it so, too."""
    if found.mean >= 1:
        return f"{found.mean:.3g} times sooner", found
    later = Effect(1 / found.mean, 1 / found.high, 1 / found.low, found.p, found.paired)
    return f"{later.mean:.3g} times later", later


def _span(metric: str, found: Effect) -> str:
    return f"{wording.gap(metric, found.low)} to {wording.gap(metric, found.high)}"
