"""Say in plain words what the runs show, and what they don't. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from hpcdist.tools.machine import remarks
from hpcdist.tools.report.analysis import SIGNIFICANT, Analysis, Contrast, RunGroup
from hpcdist.tools.report.results import JobRuns
from hpcdist.tools.report.wording import capital, count, gap, gap_span, joined, mean, seconds_to_target, value
from hpcdist.tools.statistics import MIN_SEEDS, Effect, ratio_of

LEAST_RATIO = 1.1  # of times in a headline: who is 1.03 times sooner has not won
NAMED = 4  # kinds of runs that reached the target in all seeds, in a headline; more are counted
ONE_SEED = "one seed, which shows nothing about noise"
FEW_SEEDS = f"fewer than {MIN_SEEDS} seeds, which show too little of noise"


@dataclass(frozen=True)
class Verdict:
    """The answer in a sentence or two, the reasons for it, and what to bear in mind. Names stand in backquotes."""

    headline: str
    reasons: Sequence[str]
    caveats: Sequence[str]


def judge(analysis: Analysis) -> Verdict:
    """Judge all contrasts, and say so."""
    compared = list(map(_compared, analysis.contrasts)) or [
        _described(group) for group in analysis.groups if group.ended
    ]
    first = [text for _, text in _first_to_reach(analysis)]
    return Verdict(_headline(analysis), [*_does_not_pay(analysis), *first, *compared], list(_caveats(analysis)))


# --- parts of sentences -----------------------------------------------------------------------------------------------
def _of(group: RunGroup) -> str:
    return f"{'the baseline ' * (group.kind == 'baseline')}`{group.shown}`"


def _on(group: RunGroup, *, always: bool = False) -> str:
    """Name a cell, and its number of ranks where the report has several."""
    return _of(group) + (f" on {count(group.ranks, 'rank')}" if always or group.job.has_several_ranks else "")


def _done(job: JobRuns) -> str:
    """Write at what times were taken."""
    return "trained on as many samples" if job.target is None else f"reached {value(job.metric, job.target)}"


def _reached(group: RunGroup) -> str:
    return f"{len(group.seconds_to_target)} of {count(group.tried, 'seed')}"


def _ends(*groups: RunGroup) -> str:
    """Write the mean of the metric at the end of each of these cells."""
    metric, finals = groups[0].job.metric, [group.final_mean for group in groups]
    ends = ["no finite value" if one is None else value(metric, one.mean) for one in finals]
    return f"final {metric} {' against '.join(ends)}"


def _with_ends(groups: Iterable[RunGroup]) -> str:
    """Name cells, each with its metric at the end."""
    return joined([f"{_on(group)} ({_ends(group)})" for group in groups])


def _noise(found: Effect, span: str, corrected: float | None = None) -> str:
    """Write an interval in brackets, and whether there may be no difference, by the p of this test or of all tests."""
    if math.isnan(found.p):
        return f" ({FEW_SEEDS})"
    p = found.p if corrected is None else corrected
    why = " once corrected for the number of comparisons" * (found.p < SIGNIFICANT)
    return f" ({f'within noise{why}: ' * (p >= SIGNIFICANT)}95 % interval {span})"


def _sooner(found: Effect, corrected: float | None = None) -> str:
    """Write a ratio of times as so many times sooner, or later."""
    if found.mean >= 1:
        return f"{found.mean:.3g} times sooner{_noise(found, f'{found.low:.3g} to {found.high:.3g}', corrected)}"
    return f"{1 / found.mean:.3g} times later{_noise(found, f'{1 / found.high:.3g} to {1 / found.low:.3g}', corrected)}"


# --- one cell, or two -------------------------------------------------------------------------------------------------
def _described(group: RunGroup) -> str:
    """Describe a cell that nothing is compared with."""
    text = f"{_on(group)}: final {group.job.metric} {mean(group.job.metric, group.final_mean)}"
    if group.job.target is not None:
        text += f"; {_reached(group)} {_done(group.job)}"
    if group.seconds_to_target:
        text += f", seconds to it: {seconds_to_target(group.seconds_to_target.values(), group.tried)}"
    return f"{text} ({count(len(group.ended), 'run')})."


def _compared(contrast: Contrast) -> str:
    """Say how a cell compares with the reference: time and metric, never one without the other."""
    group, other, job = contrast.group, contrast.reference, contrast.group.job
    if lost := [side for side in (group, other) if not side.ended]:
        return f"{capital(_on(lost[0]))} has no run that ended: nothing can be compared."
    if group.kind == "serial":
        text = f"One process with the same total batch, `{group.shown}`, against {_on(other)}"
    elif contrast.sooner is not None and contrast.sooner.low == contrast.sooner.high == 1:
        text = f"{_on(group)} {_done(job)} in the same time as {_of(other)}"
    elif contrast.sooner is not None:
        text = f"{_on(group)} {_done(job)} {_sooner(contrast.sooner, contrast.p_sooner)} than {_of(other)}"
    else:
        text = f"{_on(group)} {_done(job)} in {_reached(group)}, {_of(other)} in {_reached(other)}"
    return f"{capital(text)}; {_compared_metrics(contrast)}."


def _compared_metrics(contrast: Contrast) -> str:
    sides, found, metric = (contrast.group, contrast.reference), contrast.better, contrast.group.job.metric
    if found is None:
        bad = [f"{_not_finite(side)} of {_of(side)}" for side in sides if side.diverged]
        return f"the final {metric} can't be compared: no finite value in {joined(bad or ['any run of a side'])}"
    if contrast.same or math.isnan(found.p):
        return f"{_ends(*sides)}{', the same seed by seed' * contrast.same}"
    noise = _noise(found, gap_span(metric, found), contrast.p_better)
    return f"{_ends(*sides)}, a difference of {gap(metric, found.mean)}{noise}"


def _not_finite(group: RunGroup) -> str:
    return f"{group.diverged} of {count(len(group.ended), 'run')}"


# --- one rank or several ----------------------------------------------------------------------------------------------
def _does_not_pay(analysis: Analysis) -> Iterator[str]:
    """Say which cells were slower, beyond noise, than one process with the same batch as all workers together."""
    for row in analysis.scaling:
        if row.kind == "strong" and row.speedup.high < 1:
            yield (
                "Distributing did not pay against one process with the same batch: "
                f"{_on(row.group, always=True)} trained on as many samples {_sooner(row.speedup)} than "
                f"{_of(row.base)}; {_ends(row.group, row.base)}."
            )


def _first_to_reach(analysis: Analysis, least_ratio: float = 0.0) -> Iterator[tuple[RunGroup, str]]:
    """Yield the cell that was the first of all to reach the target, by each clock, and hold several ranks against one.

    Args:
        least_ratio: by how many times it was sooner, at least.
    """
    for virtual in dict.fromkeys(group.virtual for group in analysis.groups):
        groups = [group for group in analysis.groups if group.virtual == virtual and group.tried]
        first = min(groups, key=lambda group: group.mean_seconds, default=None)
        if first is None or not first.all_reached:
            continue
        others = [group for group in groups if (group.ranks > 1) != (first.ranks > 1)]
        other = min(others, key=lambda one: (one.mean_seconds, -len(one.seconds_to_target) / one.tried), default=None)
        text = f"{capital(_on(first, always=True))} was the first of all that {_done(analysis.job)}"
        if other is not None and not other.all_reached:
            text += f" ({_ends(first)}); {_on(other, always=True)} did in {_reached(other)} ({_ends(other)})."
            yield first, text
        elif other is not None and (found := ratio_of(other.seconds, first.seconds)).mean >= least_ratio:
            yield first, f"{text}: {_sooner(found)} than {_on(other, always=True)}; {_ends(first, other)}."


# --- the headline -----------------------------------------------------------------------------------------------------
def _headline(analysis: Analysis) -> str:
    """Say who was first if that was one rank, who reached the target and who did not, and who wins if anyone does."""
    if not any(group.ended for group in analysis.groups):
        return "No run has ended: there is nothing to judge yet."
    said = [text for first, text in _first_to_reach(analysis, LEAST_RATIO) if first.ranks == 1]
    said += _who_reached(analysis, bool(said))
    contenders = [contrast for contrast in analysis.contrasts if contrast.group.kind != "serial"]
    if contenders:
        differ = analysis.job.target is None or any(group.seconds_to_target for group in analysis.groups)
        said += _winners_or_none(analysis, contenders, differ and bool(said))
    reference = f"`{analysis.job.reference}`"
    return " ".join(said) or f"There is nothing to compare: no runs beside those of {reference} on as many ranks."


def _who_reached(analysis: Analysis, is_first_named: bool) -> Iterator[str]:
    """Say who reached the target and who did not, where that differs."""
    groups = [group for group in analysis.groups if group.tried]
    every, others = ([group for group in groups if group.all_reached is all_of_them] for all_of_them in (True, False))
    if analysis.job.target is None or not others or (is_first_named and len(groups) == 2):
        return
    if not any(group.seconds_to_target for group in groups):
        yield f"No run {_done(analysis.job)}."
        return
    names = joined(list(map(_on, every))) if 0 < len(every) <= NAMED else f"{len(every)} kinds of runs"
    so_far = any(group.tried < len(group.runs) for group in every)
    said = [f"{names} {_done(analysis.job)} in all {'runs so far' if so_far else 'seeds'}"] * bool(every)
    for group in others if len(others) <= NAMED else ():
        verb = "" if said else f" {_done(analysis.job)}"
        said.append(f"{_on(group)}{verb} in {_reached(group)}" + f" ({_ends(group)})" * bool(group.ended))
    if len(others) > NAMED:
        said.append(f"{len(others)} kinds of runs did not{' in all seeds' * (not every)}")
    yield f"{capital('; '.join(said))}."


def _winners_or_none(analysis: Analysis, contenders: Sequence[Contrast], follows: bool) -> Iterator[str]:
    """Say who wins against the reference, or that no one does; it `follows` on who reached the target."""
    wins, mixed, loses, alike, unknown = (
        [contrast for contrast in contenders if contrast.outcome(LEAST_RATIO) == outcome]
        for outcome in ("wins", "mixed", "loses", "alike", "unknown")
    )
    job, reference = analysis.job, f"`{analysis.job.reference}`"
    if wins:
        best = max(wins, key=lambda c: (c.group.ranks, c.p_sooner < SIGNIFICANT, c.sooner.mean if c.sooner else 0.0))
        yield "A baseline wins. " * (best.group.kind == "baseline") + _compared(best)
        if others := {one.group.name: one.group for one in reversed(wins) if one.group.name != best.group.name}:
            beat = f"beat{'s' * (len(others) == 1)} {reference}, too"
            yield f"{capital(_with_ends(others.values()))} {beat}; winners were not tested against each other."
    if mixed:
        yield "It depends: " * (not wins) + " ".join(map(_compared, mixed))
    if wins or mixed:
        return
    if len(unknown) == len(contenders):
        yield _untested(analysis, contenders)
        return
    if loses:
        many = "all" if len(loses) == len(contenders) else f"{len(loses)} of {len(contenders)}"
        bests = {one.reference.label: one.reference for one in contenders}.values()
        nothing = "On as many ranks nothing" if follows else "Nothing"
        yield f"{nothing} beats {_with_ends(bests)}: {many} of what was held against it did worse, beyond noise."
    else:
        small = any(one.outcome() != "alike" for one in alike)
        if small:
            yield f"Nothing {_done(job)} {LEAST_RATIO:g} times sooner or later than {reference}."
        tested = ["time"] * any(not math.isnan(one.p_sooner) for one in alike)
        tested += [job.metric] * any(not math.isnan(one.p_better) for one in alike)
        seeds = sorted({len(side.ended) for one in alike for side in (one.group, one.reference)})
        several = " to ".join(dict.fromkeys(map(str, (seeds[0], seeds[-1]))))
        none = f"no {'other ' * (follows or small)}difference from {reference} can be told from noise"
        yield f"With {several} seeds {none}, in {' or in '.join(tested)}."
    if unknown:
        yield "Some could not be tested."


def _untested(analysis: Analysis, contenders: Sequence[Contrast]) -> str:
    most = max(min(len(contrast.group.ended), len(contrast.reference.ended)) for contrast in contenders)
    if not most:
        return f"There is nothing to compare: no run beside those of `{analysis.job.reference}` has ended."
    if most >= MIN_SEEDS:
        return "The runs that ended do not suffice to test anything."
    few, these = (ONE_SEED, "this seed") if most == 1 else (FEW_SEEDS, "these seeds")
    text = f"Each comparison has {few}, so that nothing here is a result."
    virtual = contenders[0].group.virtual  # seconds of other clocks can't be compared with theirs
    groups = [group for group in analysis.groups if group.virtual == virtual and group.final]
    fastest = min(groups, key=lambda group: group.mean_seconds, default=None)
    if fastest is None or math.isinf(fastest.mean_seconds):
        return text
    best = max(groups, key=lambda group: fmean(group.final.values()) * (1 if group.job.higher_is_better else -1))
    text += f" In {these} {_on(fastest)} was the fastest ({_ends(fastest)})"
    if fmean(best.final.values()) != fmean(fastest.final.values()):
        text += f", {_on(best)} the best in {best.job.metric} ({_ends(best)})"
    return f"{text}."


# --- what to bear in mind ---------------------------------------------------------------------------------------------
def _caveats(analysis: Analysis) -> Iterator[str]:
    """Yield all that limits the verdict."""
    groups, job, failed = analysis.groups, analysis.job, len(analysis.failures)
    if virtual := sum(group.virtual for group in groups):
        which = "All runs" if virtual == len(groups) else f"{virtual} of {len(groups)} kinds of runs"
        yield f"{which} are of virtual ranks: their seconds are virtual, and none was measured by a clock."
    yield from _machine(job)
    if few := [len(group.ended) for group in groups if 0 < len(group.ended) < MIN_SEEDS]:
        which = (
            "Every kind of run has" if len(few) == len(groups) else f"{len(few)} of {len(groups)} kinds of runs have"
        )
        yield f"{which} {ONE_SEED if max(few) == 1 else FEW_SEEDS}: there is no interval."
    for group in groups:
        if job.target is not None and group.ended and not group.all_reached:
            yield f"{capital(_on(group))}: {_reached(group)} {_done(job)}."
        if group.diverged:
            yield f"{capital(_on(group))}: {_not_finite(group)} ended with no finite {job.metric}."
    for one in job.runs:
        if one.run.ended and one.run.changes:
            yield f"`{one.run.folder}` was resumed with other settings, and stands alone: {'; '.join(one.run.changes)}."
    if failed:
        yield f"{count(failed, 'run')} without a result: listed below, and in no number."
    if job.target is not None:
        yield "The time to the target is that of the first evaluation that met it: it is rounded up."
    else:
        yield (
            "No target was set, so that times are those for as many samples, not for as good a model; "
            f"`--target {job.metric}=VALUE` sets one."
        )
    yield from _room(analysis)
    tests = sum(not math.isnan(p) for contrast in analysis.contrasts for p in (contrast.p_sooner, contrast.p_better))
    if tests > 1:
        yield (
            f"{tests} comparisons were made. Differences count as real where p is below {SIGNIFICANT:g} after "
            "Holm's correction for all of them; intervals are each one's own."
        )
    if job.tuning:
        yield "Rates were tuned before, on seeds of their own, which are in no number here."


def _machine(job: JobRuns) -> Iterator[str]:
    """Say that ranks shared cores, or that the machine was busy, for each host where that was so."""
    starts = [one.run.start for one in job.runs if one.run.start and one.run.start.cores and not one.virtual]
    for host in dict.fromkeys(host for start in starts for host in start.cores):
        here = [start for start in starts if host in start.cores]
        most = max(start.hosts.count(host) for start in here)
        cores = min(start.cores[host] for start in here if start.hosts.count(host) == most)
        first = [start for start in here if start.hosts[0] == host]
        load = max((load for start in first for load in start.load), default=0.0)
        processors = max((start.processors or 0 for start in first), default=0)
        yield from (f"{host}: {text}" for text in remarks(most, cores, processors, load))


def _room(analysis: Analysis) -> Iterator[str]:
    """Say how large differences may be that were called noise."""
    metric, contrasts = analysis.job.metric, [one for one in analysis.contrasts if one.group.kind != "serial"]
    times = [one.sooner for one in contrasts if one.sooner is not None and not one.p_sooner < SIGNIFICANT]
    gaps = [one.better for one in contrasts if one.better is not None and not one.p_better < SIGNIFICANT]
    factor = max((max(one.high, 1 / one.low) for one in times if one.low < one.high), default=0.0)
    largest = max((max(one.high, -one.low) for one in gaps if one.low < one.high), default=0.0)
    room = [f"a factor of {factor:.3g} in time"] * (factor > 0)
    room += [f"{gap(metric, largest, sign=False)} of {metric}"] * (largest > 0)
    if room:
        yield f"Within noise does not mean alike: intervals leave room for {joined(room)}. More seeds narrow them."
