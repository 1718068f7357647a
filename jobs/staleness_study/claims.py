"""What the paper claims, held against what was measured: a paragraph per claim, with a verdict by a rule it states."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from statistics import fmean

from hpcdist.study import Interval, interval
from staleness_study.grid import MODULATIONS, PROTOCOLS, REFERENCE_BATCH
from staleness_study.grid import Cell, Results, asynchronous, even, hardsync, one_softsync, softsync

CLOSE = 1.0  # points of error that count as no difference
FLAT = 0.25  # part of the spread over μ that the spread along μλ = B may have
LONGER = 1.01  # times as long is what counts as slower
NEAR = 0.15  # relative deviation from (λ − 1)/c that counts as "about"
COLUMNS = 120

Found = tuple[str, list[bool], str]  # the claim, whether each part of it is shown, and by which numbers


def paragraphs(results: Results) -> list[str]:
    found = (modulation(results), batches(results), runtime(results), staleness(results))
    return [
        textwrap.fill(f"{number}. {claim} {_verdict(parts)}. {text}", COLUMNS, break_on_hyphens=False)
        for number, (claim, parts, text) in enumerate(found, 1)
    ]


def modulation(results: Results) -> Found:
    batch, learners = results.grid.probe
    reference = hardsync(batch, learners)
    plain, average, each = (
        [softsync(n, rule, batch, learners) for n in results.grid.splits] for rule in MODULATIONS
    )
    loss = results.worse_by(plain[-1], reference)
    gap = max(results.worse_by(cell, reference).mean for cell in average)
    along = [asynchronous(*pair, "none") for pair in results.grid.diagonal]
    return (
        "Without modulation a large n is worse or diverges; divided by n, every n ends where hardsync does.",
        [loss.low > 0, gap <= CLOSE],
        f"At μ = {batch}, λ = {learners} hardsync ends with {results.error(reference):.2f} % of the test samples "
        f"wrong. Without modulation: {_errors(results, plain)}; the largest n is above hardsync by {loss:.2f} points "
        f"(runs of the same seed), an interval that {'excludes' if loss.low > 0 else 'does not exclude'} 0. Async "
        f"without modulation where μλ = {REFERENCE_BATCH}: {_errors(results, along)}. With the rate divided by n: "
        f"{_errors(results, average)}; above hardsync by at most {gap:.2f} points, where up to {CLOSE:g} counts as "
        f"the same. Divided by each gradient's own staleness: {_errors(results, each)}.",
    )


def batches(results: Results) -> Found:
    grid, parts, sentences = results.grid, [], []
    for name, protocol in PROTOCOLS.items():
        lines = {p: [protocol(batch, p) for batch in grid.batches] for p in grid.learners}
        growth = {p: results.worse_by(cells[-1], cells[0]) for p, cells in lines.items()}
        over_batches = fmean(_spread(results, cells) for cells in lines.values())
        along = [protocol(*pair) for pair in grid.diagonal]
        spread, grows = _spread(results, along), [gain.low > 0 for gain in growth.values()]
        parts += [all(grows), spread <= FLAT * over_batches]
        listed = "; ".join(f"{gain:.2f} at λ = {learners}" for learners, gain in growth.items())
        errors = "; ".join(f"{_error(results, cell)} at ({cell.batch}, {cell.learners})" for cell in along)
        sentences.append(
            f"{name}: from μ = {grid.batches[0]} to {grid.batches[-1]} the error grows by {listed} (points), an "
            f"interval above 0 for {sum(grows)} of {len(grows)} λ; at the (μ, λ) with μλ = {REFERENCE_BATCH} it is "
            f"{errors}, a spread of {spread:.2f} points, where up to {FLAT:.0%} of that over μ at fixed λ "
            f"({over_batches:.2f} on average) counts as flat."
        )
    note = "Hardsync is one process with batch μλ, so that its being flat checks the set-up."
    return "At fixed λ the error grows with μ; along μλ = constant it is flat.", parts, " ".join([*sentences, note])


def runtime(results: Results) -> Found:
    grid = results.grid
    every = [(batch, learners) for batch in grid.batches for learners in grid.learners]
    slower = {pair: _ratio(results, hardsync(*pair), one_softsync(*pair)) for pair in every}
    faster = {pair: _ratio(results, one_softsync(*pair), asynchronous(*pair)) for pair in every}
    slowest, fastest = ([ratio.low > LONGER for ratio in ratios.values()] for ratios in (slower, faster))
    batch = grid.probe[0]
    jittered = {p: slower[batch, p].mean for p in grid.learners}
    controls = {p: _ratio(results, even(hardsync(batch, p)), even(one_softsync(batch, p))).mean for p in grid.learners}
    apart = max(abs(ratio.mean - 1) for ratio in faster.values())
    return (
        "Hardsync is slowest under jitter, async fastest.",
        [all(slowest), all(fastest)],
        f"Hardsync takes longer than 1-softsync (by more than {LONGER - 1:.0%}) at {sum(slowest)} of {len(slower)} "
        f"(μ, λ), at μ = {batch} {_times(jittered)}. Not all of that is jitter: with steps that all take equally "
        f"long it is {_times(controls)}, because hardsync's server has all learners to answer at the same moment, "
        f"and does it one after the other. Async is faster than 1-softsync at {sum(fastest)} of {len(faster)} (μ, "
        f"λ); their mean times differ by {apart:.1%} at most. Neither waits for anyone, both move the same messages, "
        "and the virtual server's updates take no time, so that nothing here could make async the faster one.",
    )


def staleness(results: Results) -> Found:
    batch, learners = results.grid.probe
    stale = [cell for cell in results.runs if cell.splits]
    off = {cell: results.staleness(cell).mean / cell.expected_staleness - 1 for cell in stale}
    low, high = min(off, key=off.__getitem__), max(off, key=off.__getitem__)
    beyond = [_share_beyond(results, cell) for cell in stale]
    listed = "; ".join(
        f"{results.staleness(cell):.2f} at n = {cell.splits}, where (λ − 1)/c = {cell.expected_staleness:.2f} "
        f"(largest {max(results.histogram(cell))})"
        for cell in (softsync(n, "average", batch, learners) for n in results.grid.splits)
    )
    return (
        "The mean staleness of n-softsync is about n, (λ − 1)/c.",
        [max(map(abs, off.values())) <= NEAR],
        f"At μ = {batch}, λ = {learners}: {listed}. Over all {len(stale)} cells the mean deviates from (λ − 1)/c by "
        f"{off[low]:+.1%} ({_name(low)}) to {off[high]:+.1%} ({_name(high)}), and up to {NEAR:.0%} counts as about. "
        "A run's first gradients are all of the same parameters and its last meet learners that have ended, which "
        "lowers the mean of short runs. The largest part of a cell's gradients that are more than 2n updates stale "
        f"is {max(beyond):.2%}.",
    )


# --- the parts of sentences -------------------------------------------------------------------------------------------
def _verdict(parts: Sequence[bool]) -> str:
    return "SHOWN" if all(parts) else "SHOWN IN PART" if any(parts) else "NOT SHOWN"


def _name(cell: Cell) -> str:
    return f"{cell.protocol} at μ = {cell.batch}, λ = {cell.learners}"


def _error(results: Results, cell: Cell) -> str:
    diverged = results.diverged(cell)
    return f"{results.error(cell):.2f}" + f" ({diverged} of {len(results.runs[cell])} diverged)" * bool(diverged)


def _errors(results: Results, cells: Iterable[Cell]) -> str:
    return "; ".join(f"{_error(results, cell)} at n = {cell.splits}" for cell in cells)


def _spread(results: Results, cells: Iterable[Cell]) -> float:
    """The largest mean error less the smallest."""
    means = [results.error(cell).mean for cell in cells]
    return max(means) - min(means)


def _ratio(results: Results, first: Cell, second: Cell) -> Interval:
    """Virtual time of one cell over another's, of runs of the same seed."""
    times = (results.measured(cell, "virtual_s") for cell in (first, second))
    return interval([a / b for a, b in zip(*times, strict=True)])


def _times(ratios: dict[int, float]) -> str:
    """Ratios of times by number of learners."""
    return "; ".join(f"{ratio:.2f} times as long at λ = {learners}" for learners, ratio in ratios.items())


def _share_beyond(results: Results, cell: Cell) -> float:
    """The part of the gradients that are more than 2n updates stale."""
    histogram = results.histogram(cell)
    return sum(count for value, count in histogram.items() if value > 2 * cell.splits) / sum(histogram.values())
