"""What the paper claims, held against what was measured: a paragraph per claim, with a verdict by a rule it states."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from hpcdist.study import interval
from scaling_study.cells import STRAGGLERS, SYNCHRONOUS, Cell, Results

FEW = 32  # workers, up to which the asynchronous methods should be ahead
COLUMNS = 120

Found = tuple[str, list[bool], str]  # the claim, whether each part of it is shown, and by which numbers


def paragraphs(of_all: Sequence[Results]) -> list[str]:
    """Three for each kind of steps and target."""
    found = [claim(results) for results in of_all for claim in (few, many, consistency)]
    return [
        textwrap.fill(f"{number}. {claim} {_verdict(parts)}. {text}", COLUMNS, break_on_hyphens=False)
        for number, (claim, parts, text) in enumerate(found, 1)
    ]


def few(results: Results) -> Found:
    parts, told = [], []
    for reference, others in _by_workers(results):
        if reference.workers <= FEW:
            ratios = {cell.name: results.ratio(cell, reference) for cell in others}
            reaching = {name: ratio for name, ratio in ratios.items() if ratio is not None}
            first = min(reaching, key=lambda name: reaching[name].mean, default=None)
            parts.append(first is not None and reaching[first].high < 1)
            ahead = "none with every seed" if first is None else f"{first} {reaching[first]:.2f}"
            told.append(f"p = {reference.workers}: {ahead}")
    return (
        f"With {_words(results)}, asynchronous methods reach it sooner on up to {FEW} workers.",
        parts,
        f"Time of the fastest of them over all-reduce's, of runs of the same seed: {'; '.join(told)}. Sooner is where "
        "the 95 % interval lies below 1.",
    )


def many(results: Results) -> Found:
    parts, told = [], []
    for reference, others in _by_workers(results):
        if reference.workers > FEW:
            ratios = {cell.name: results.ratio(cell, reference) for cell in others}
            behind = [results.reached(reference) and (ratio is None or ratio.low > 1) for ratio in ratios.values()]
            parts.append(all(behind))
            listed = ", ".join(f"{name} {'not always' if r is None else f'{r:.2f}'}" for name, r in ratios.items())
            told.append(f"p = {reference.workers}: {listed}")
    last = [results.of(name)[-1] for name in results.names()]
    gains = ", ".join(f"{cell.name} {_gain(results, cell)}" for cell in last)
    return (
        f"With {_words(results)}, all-reduce reaches it before all of them on more than {FEW}.",
        parts,
        f"Their times over all-reduce's: {'; '.join(told) or 'not run'}. All is before where no other reaches the "
        f"target with every seed in less than all-reduce's time. How many times sooner than on its fewest workers each "
        f"strategy is on its most: {gains}.",
    )


def consistency(results: Results) -> Found:
    parts, told = [], []
    for reference, others in _by_workers(results):
        own, least = results.spread(reference), min(others, key=results.spread)
        parts.append(own <= results.spread(least))
        losses = interval(results.losses(reference)), interval(results.losses(least))
        told.append(f"p = {reference.workers}: {losses[0]:.3f}, {least.name} {losses[1]:.3f}")
    return (
        f"With {_words(results)}, all-reduce converges most consistently.",
        parts,
        f"Final test loss, of all-reduce and of the other whose runs differ least: {'; '.join(told)}. Most consistent "
        "is whose interval is the smallest part of its mean.",
    )


def _by_workers(results: Results) -> Iterator[tuple[Cell, list[Cell]]]:
    """All-reduce on each number of workers, and the others on as many."""
    for reference in results.of(SYNCHRONOUS):
        found = (results.cell(name, reference.workers) for name in results.names())
        yield reference, [cell for cell in found if cell not in (None, reference)]


def _gain(results: Results, cell: Cell) -> str:
    gained = results.ratio(results.first(cell), cell)
    return "does not reach it" if gained is None else f"{gained:.1f}"


def _words(results: Results) -> str:
    steps = "stragglers" if results.steps == STRAGGLERS else "even steps"
    return f"{steps} and a target of {results.target:g}"


def _verdict(parts: list[bool]) -> str:
    return "NOT RUN" if not parts else "SHOWN" if all(parts) else "SHOWN IN PART" if any(parts) else "NOT SHOWN"
