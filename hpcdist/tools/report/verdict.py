"""Conclusions of a report in plain sentences, with caveats. No input or output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from hpcdist.tools.console import count
from hpcdist.tools.machine import timing_warnings
from hpcdist.tools.report.analysis import SIGNIFICANT, Analysis, Contrast, RunGroup
from hpcdist.tools.report.results import JobRuns, finals, percent
from hpcdist.tools.report.wording import capital, gap, gap_span, joined, mean, seconds_to_target, value
from hpcdist.tools.statistics import MIN_SEEDS, Effect, ratio_of

LEAST_RATIO = 1.1  # of times, to win in a headline: 1.03 times sooner is no win
NAMED = 4  # groups listed in a headline; more are counted
ONE_SEED = "one seed, which can't show noise"
FEW_SEEDS = f"fewer than {MIN_SEEDS} seeds, too few to estimate noise"


@dataclass(frozen=True)
class Verdict:
    """The conclusion in a sentence or two, reasons for it, and caveats. Names are in backquotes."""

    headline: str
    reasons: Sequence[str]
    caveats: Sequence[str]


def judge(analysis: Analysis) -> Verdict:
    """Write the conclusion on all comparisons of a job."""
    compared = list(map(_compared, analysis.contrasts)) or [_described(g) for g in analysis.groups if g.ended]
    first = [text for _, text in _first_to_reach(analysis)]
    return Verdict(_headline(analysis), [*_does_not_pay(analysis), *first, *compared], list(_caveats(analysis)))


# --- parts of sentences -----------------------------------------------------------------------------------------------
def _of(group: RunGroup) -> str:
    return f"{'the baseline ' * (group.kind == 'baseline')}`{group.display_name}`"


def _on(group: RunGroup, *, always: bool = False) -> str:
    """Return a group's name, with its number of ranks if the report has several numbers of ranks, or `always`."""
    return _of(group) + (f" on {count(group.ranks, 'rank')}" if always or group.job.has_several_ranks else "")


def _done(job: JobRuns) -> str:
    """Return the verb phrase of a time: "reached 93 %", or "trained on as many samples"."""
    return _met(job) if job.has_reached else "trained on as many samples"


def _met(job: JobRuns) -> str:
    return f"reached {value(job.metric, job.target or 0.0)}"


def _reached(group: RunGroup) -> str:
    return f"{len(group.seconds_to_target)} of {count(group.n_started, 'seed')}"


def _ends(*groups: RunGroup) -> str:
    """Format the final metric of one group, or of two: `final accuracy 97 % against 96 %`."""
    metric, finals = groups[0].job.metric, [group.final_mean for group in groups]
    ends = ["no finite value" if final is None else value(metric, final.mean) for final in finals]
    return f"final {metric} {' against '.join(ends)}"


def _with_ends(groups: Iterable[RunGroup]) -> str:
    """List groups, each with its final metric."""
    return joined([f"{_on(group)} ({_ends(group)})" for group in groups])


def _noise(change: Effect, span: str, corrected: float | None = None) -> str:
    """Return an interval in brackets, marked "within noise" unless p is significant; `corrected` is p after Holm."""
    if math.isnan(change.p):
        return f" ({FEW_SEEDS})"
    p = change.p if corrected is None else corrected
    correction = " once corrected for the number of comparisons" * (change.p < SIGNIFICANT)
    return f" ({f'within noise{correction}: ' * (p >= SIGNIFICANT)}95 % interval {span})"


def _sooner(ratio: Effect, corrected: float | None = None) -> str:
    """Format a ratio of times: 1.5 times sooner, or later."""
    if ratio.mean >= 1:
        return f"{ratio.mean:.3g} times sooner{_noise(ratio, f'{ratio.low:.3g} to {ratio.high:.3g}', corrected)}"
    return f"{1 / ratio.mean:.3g} times later{_noise(ratio, f'{1 / ratio.high:.3g} to {1 / ratio.low:.3g}', corrected)}"


# --- one group, or two ------------------------------------------------------------------------------------------------
def _described(group: RunGroup) -> str:
    """Describe a group without a reference."""
    text = f"{_on(group)}: final {group.job.metric} {mean(group.job.metric, group.final_mean)}"
    if group.job.target is not None:
        text += f"; {_reached(group)} {_met(group.job)}"
    if group.seconds_to_target:
        text += f", seconds to it: {seconds_to_target(group.seconds_to_target.values(), group.n_started)}"
    return f"{text} ({count(len(group.ended), 'run')})."


def _compared(contrast: Contrast) -> str:
    """Write a sentence that compares a group with the reference by time and by final metric."""
    group, other, job = contrast.group, contrast.reference, contrast.group.job
    if unfinished := [side for side in (group, other) if not side.ended]:
        return f"{capital(_on(unfinished[0]))} has no run that ended: nothing can be compared."
    if group.kind == "serial":
        text = f"One process with the same total batch, `{group.display_name}`, against {_on(other)}"
    elif contrast.speedup is not None and contrast.speedup.low == contrast.speedup.high == 1:
        text = f"{_on(group)} {_done(job)} in the same time as {_of(other)}"
    elif contrast.speedup is not None:
        text = f"{_on(group)} {_done(job)} {_sooner(contrast.speedup, contrast.p_speedup)} than {_of(other)}"
    else:
        text = f"{_on(group)} {_done(job)} in {_reached(group)}, {_of(other)} in {_reached(other)}"
    return f"{capital(text)}; {_compared_metrics(contrast)}."


def _compared_metrics(contrast: Contrast) -> str:
    """Compare the final metrics of two groups, as the second half of a sentence."""
    groups, change, metric = (contrast.group, contrast.reference), contrast.difference, contrast.group.job.metric
    if change is None:
        bad = [f"{_not_finite(group)} of {_of(group)}" for group in groups if group.diverged]
        return f"the final {metric} can't be compared: no finite value in {joined(bad or ['any run of one group'])}"
    if contrast.same or math.isnan(change.p):
        return f"{_ends(*groups)}{', the same seed by seed' * contrast.same}"
    noise = _noise(change, gap_span(metric, change), contrast.p_difference)
    return f"{_ends(*groups)}, a difference of {gap(metric, change.mean)}{noise}"


def _not_finite(group: RunGroup) -> str:
    return f"{group.diverged} of {count(len(group.ended), 'run')}"


# --- one rank or several ----------------------------------------------------------------------------------------------
def _does_not_pay(analysis: Analysis) -> Iterator[str]:
    """Yield a sentence for each group that was significantly slower than one process with the same total batch."""
    for row in analysis.scaling:
        if row.kind == "strong" and row.speedup.high < 1:
            yield (
                "Distributing did not pay against one process with the same batch: "
                f"{_on(row.group, always=True)} trained on as many samples {_sooner(row.speedup)} than "
                f"{_of(row.base)}; {_ends(row.group, row.base)}."
            )


def _first_to_reach(analysis: Analysis, min_ratio: float = 0.0) -> Iterator[tuple[RunGroup, str]]:
    """Yield the group that reached the target first, and a sentence about it; one for real, one for virtual time.

    The sentence compares a group on one rank with the fastest on several ranks, and the reverse.

    Args:
        min_ratio: yield nothing for a smaller ratio of the two times.
    """
    for virtual in dict.fromkeys(group.virtual for group in analysis.groups):
        groups = [group for group in analysis.groups if group.virtual == virtual and group.n_started]
        first = min(groups, key=lambda group: group.mean_seconds, default=None)
        if first is None or not first.all_reached:
            continue
        others = [group for group in groups if (group.ranks > 1) != (first.ranks > 1)]
        other = min(
            others,
            key=lambda candidate: (candidate.mean_seconds, -len(candidate.seconds_to_target) / candidate.n_started),
            default=None,
        )
        text = f"{capital(_on(first, always=True))} was the first of all that {_done(analysis.job)}"
        if other is not None and not other.all_reached:
            text += f" ({_ends(first)}); {_on(other, always=True)} did in {_reached(other)} ({_ends(other)})."
            yield first, text
        elif other is not None and (ratio := ratio_of(other.seconds, first.seconds)).mean >= min_ratio:
            yield first, f"{text}: {_sooner(ratio)} than {_on(other, always=True)}; {_ends(first, other)}."


# --- the headline -----------------------------------------------------------------------------------------------------
def _headline(analysis: Analysis) -> str:
    """Return the headline: the fastest if that is one rank, who reached the target, and who beats the reference."""
    if not any(group.ended for group in analysis.groups):
        return "No run has ended: there is nothing to judge yet."
    sentences = [text for first, text in _first_to_reach(analysis, LEAST_RATIO) if first.ranks == 1]
    sentences += _who_reached(analysis, " ".join(sentences))
    contenders = [contrast for contrast in analysis.contrasts if contrast.group.kind != "serial"]
    if contenders:
        some_reached = analysis.job.target is None or analysis.job.has_reached
        found = list(_winners_or_none(analysis, contenders, some_reached and bool(sentences)))
        untested = all(contrast.outcome(LEAST_RATIO) == "unknown" for contrast in contenders)
        sentences = found + sentences if untested else sentences + found  # the caveat first
    reference = f"`{analysis.job.reference}`"
    return " ".join(sentences) or f"There is nothing to compare: no runs but those of {reference} on these ranks."


def _who_reached(analysis: Analysis, said: str) -> Iterator[str]:
    """Yield a sentence on the groups that reached the target and those that did not, except those that were `said`.

    It yields none if all did.
    """
    groups = [group for group in analysis.groups if group.n_started]
    if analysis.job.target is None or all(group.all_reached for group in groups):
        return
    rest = [group for group in groups if _on(group, always=True) not in said]
    in_all, others = ([group for group in rest if group.all_reached is reached] for reached in (True, False))
    if not rest:
        return
    if not any(group.seconds_to_target for group in groups):
        job = analysis.job
        yield f"No run {_met(job)}. {percent(job.metric, job.target, finals([job], job.metric))}".rstrip()
        return
    names = joined(list(map(_on, in_all))) if 0 < len(in_all) <= NAMED else f"{len(in_all)} groups of runs"
    so_far = any(group.n_started < len(group.runs) for group in in_all)
    clauses = [f"{names} {_done(analysis.job)} in all {'runs so far' if so_far else 'seeds'}"] * bool(in_all)
    for group in others if len(others) <= NAMED else ():
        verb = "" if clauses else f" {_done(analysis.job)}"
        clauses.append(f"{_on(group)}{verb} in {_reached(group)}" + f" ({_ends(group)})" * bool(group.ended))
    if len(others) > NAMED:
        clauses.append(f"{len(others)} groups of runs did not{' in all seeds' * (not in_all)}")
    yield f"{capital('; '.join(clauses))}."


def _winners_or_none(analysis: Analysis, contenders: Sequence[Contrast], follows: bool) -> Iterator[str]:
    """Yield sentences on the groups that beat the reference, or that none does; `follows`: after one on the target."""
    wins, mixed, loses, tied, unknown = (
        [contrast for contrast in contenders if contrast.outcome(LEAST_RATIO) == outcome]
        for outcome in ("wins", "mixed", "loses", "tied", "unknown")
    )
    job, reference = analysis.job, f"`{analysis.job.reference}`"
    if wins:
        best = max(wins, key=lambda c: (c.group.ranks, c.p_speedup < SIGNIFICANT, c.speedup.mean if c.speedup else 0.0))
        yield "A baseline wins. " * (best.group.kind == "baseline") + _compared(best)
        if others := {item.group.name: item.group for item in reversed(wins) if item.group.name != best.group.name}:
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
        references = {item.reference.label: item.reference for item in contenders}.values()
        nothing = "On as many ranks nothing" if follows else "Nothing"
        yield f"{nothing} beats {_with_ends(references)}: {many} groups compared with it did significantly worse."
    else:
        small = any(item.outcome() != "tied" for item in tied)
        if small:
            yield f"Nothing {_done(job)} {LEAST_RATIO:g} times sooner or later than {reference}."
        tested = ["time"] * any(not math.isnan(item.p_speedup) for item in tied)
        tested += [job.metric] * any(not math.isnan(item.p_difference) for item in tied)
        seeds = sorted({len(side.ended) for item in tied for side in (item.group, item.reference)})
        n_seeds = " to ".join(dict.fromkeys(map(str, (seeds[0], seeds[-1]))))
        text = f"no {'other ' * (follows or small)}difference from {reference} can be told from noise"
        yield f"With {n_seeds} seeds {text}, in {' or in '.join(tested)}."
    if unknown:
        yield "Some could not be tested."


def _untested(analysis: Analysis, contenders: Sequence[Contrast]) -> str:
    """Return the headline if there are too few seeds for tests: the fastest and the best group."""
    max_runs = max(min(len(contrast.group.ended), len(contrast.reference.ended)) for contrast in contenders)
    if not max_runs:
        return f"There is nothing to compare: only runs of `{analysis.job.reference}` have ended."
    if max_runs >= MIN_SEEDS:
        return "Too few runs have ended for a test."
    few, these = (ONE_SEED, "this seed") if max_runs == 1 else (FEW_SEEDS, "these seeds")
    text = f"Each comparison has {few}: nothing here is a result."
    virtual = contenders[0].group.virtual  # real and virtual seconds can't be compared
    groups = [group for group in analysis.groups if group.virtual == virtual and group.final]
    fastest = min(groups, key=lambda group: group.mean_seconds, default=None)
    if fastest is None or math.isinf(fastest.mean_seconds):
        return text
    best = max(groups, key=lambda group: fmean(group.final.values()) * (1 if group.job.higher_is_better else -1))
    is_said = any(first is fastest and first.ranks == 1 for first, _ in _first_to_reach(analysis, LEAST_RATIO))
    claims = [f"{_on(fastest)} was the fastest ({_ends(fastest)})"] * (not is_said)
    if fmean(best.final.values()) != fmean(fastest.final.values()):
        claims.append(f"{_on(best)} {'was ' * is_said}the best in {best.job.metric} ({_ends(best)})")
    return f"{text} In {these} {', '.join(claims)}." if claims else text


# --- caveats ----------------------------------------------------------------------------------------------------------
def _caveats(analysis: Analysis) -> Iterator[str]:
    """Yield everything that limits the conclusion."""
    groups, job, failed = analysis.groups, analysis.job, len(analysis.failures)
    if virtual := sum(group.virtual for group in groups):
        subject = "All runs" if virtual == len(groups) else f"{virtual} of {len(groups)} groups of runs"
        yield f"{subject} used virtual ranks: their seconds are simulated, not measured."
    yield from _machine(job)
    if few := [len(group.ended) for group in groups if 0 < len(group.ended) < MIN_SEEDS]:
        subject = "Every group has" if len(few) == len(groups) else f"{len(few)} of {len(groups)} groups have"
        yield f"{subject} {ONE_SEED if max(few) == 1 else FEW_SEEDS}: there is no interval."
    for group in groups:
        if job.target is not None and group.ended and not group.all_reached:
            yield f"{capital(_on(group))}: {_reached(group)} {_met(job)}."
        if group.diverged:
            yield f"{capital(_on(group))}: {_not_finite(group)} ended with no finite {job.metric}."
    for result in job.runs:
        if result.run.ended and result.run.changes:
            changes = "; ".join(result.run.changes)
            yield f"`{result.run.folder}` was resumed with other settings, and forms its own group: {changes}."
    if failed:
        yield f"{count(failed, 'run')} without a result: listed below, not included in the numbers."
    if job.has_reached:
        yield "The metric is measured only at evaluations: times to the target are up to one interval too long."
    else:
        why = "No target was set" if job.target is None else "No run reached the target"
        yield (
            f"{why}: times are compared for the same number of samples, not for an equally good model; "
            f"`--target {job.metric}=VALUE` sets one."
        )
    yield from _room(analysis)
    tests = sum(not math.isnan(p) for c in analysis.contrasts for p in (c.p_speedup, c.p_difference))
    if tests > 1:
        yield (
            f"{tests} comparisons were made. A difference is significant if p, after Holm's correction for all of "
            f"them, is below {SIGNIFICANT:g}; the intervals are not corrected."
        )
    if job.tuning:
        yield "Learning rates were tuned before, on separate seeds, which are not included here."


def _machine(job: JobRuns) -> Iterator[str]:
    """Yield warnings for each host of real ranks: ranks shared cores, or the host was busy."""
    starts = [r.run.start for r in job.runs if r.run.start and r.run.start.cores and not r.virtual]
    for host in dict.fromkeys(host for start in starts for host in start.cores):
        host_starts = [start for start in starts if host in start.cores]
        max_ranks = max(start.hosts.count(host) for start in host_starts)
        cores = min(start.cores[host] for start in host_starts if start.hosts.count(host) == max_ranks)
        first_host_starts = [start for start in host_starts if start.hosts[0] == host]
        load = max((load for start in first_host_starts for load in start.load), default=0.0)
        processors = max((start.processors or 0 for start in first_host_starts), default=0)
        yield from (f"{host}: {text}" for text in timing_warnings(max_ranks, cores, processors, load))


def _room(analysis: Analysis) -> Iterator[str]:
    """Yield a sentence on how large the differences that are called noise may be."""
    metric, contrasts = (analysis.job.metric, [c for c in analysis.contrasts if c.group.kind != "serial"])
    times = [c.speedup for c in contrasts if c.speedup is not None and not c.p_speedup < SIGNIFICANT]
    gaps = [c.difference for c in contrasts if c.difference is not None and not c.p_difference < SIGNIFICANT]
    factor = max((max(c.high, 1 / c.low) for c in times if c.low < c.high), default=0.0)
    largest = max((max(c.high, -c.low) for c in gaps if c.low < c.high), default=0.0)
    room = [f"a factor of {factor:.3g} in time"] * (factor > 0)
    room += [f"{gap(metric, largest, sign=False)} of {metric}"] * (largest > 0)
    if room:
        yield f"Within noise does not mean equal: the intervals allow for {joined(room)}. More seeds narrow them."
