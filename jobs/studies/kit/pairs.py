"""Compare runs pair by pair: of runs of the same seed, what both share cancels."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.tools.statistics import Interval, interval


def difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Estimate by how much values are above others, pair by pair."""
    return interval([a - b for a, b in zip(values, others, strict=True)])


def ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Estimate how many times others values are, pair by pair."""
    return interval([a / b for a, b in zip(values, others, strict=True)])


def excludes(one: Interval, value: float) -> bool:
    """Tell whether a value lies outside; never where the width is unknown."""
    return one.low > value or one.high < value
