"""Means and what they are worth."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import TypeVar

from scipy.special import stdtr, stdtrit  # Student's t and its quantile; scipy.stats takes a second to import

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)  # a seed


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its confidence interval; NaN where one value leaves it unknown."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __format__(self, spec: str) -> str:
        mean = f"{self.mean:{spec}}"
        return mean if math.isnan(self.half) else f"{mean} ± {self.half:{spec.lstrip('+')}}"


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Estimate the mean of independent values and its confidence interval, as of normally distributed ones.

    Reference: Student, "The probable error of a mean", 1908.
    """
    n = len(values)
    if n < 2:
        return Interval(fmean(values), math.nan)
    return Interval(fmean(values), float(stdtrit(n - 1, (1 + confidence) / 2)) * stdev(values) / math.sqrt(n))


@dataclass(frozen=True)
class GeometricMean:
    """A geometric mean and its confidence interval, whose ends are NaN where one value leaves it unknown."""

    geometric_mean: float
    low: float
    high: float


def geometric(values: Sequence[float]) -> GeometricMean:
    """Estimate the geometric mean of positive values: the mean of their logarithms, as ratios of times are of these."""
    logs = interval([math.log(value) for value in values])
    return GeometricMean(*map(math.exp, (logs.mean, logs.low, logs.high)))


def first_reaching(moments: Iterable[tuple[T, float]], target: float, higher_is_better: bool) -> T | None:
    """Find the first moment whose value reaches a target; None where none does."""
    sign = 1 if higher_is_better else -1
    return next((moment for moment, value in moments if sign * value >= sign * target), None)


# --- tests of differences ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Effect:
    """A difference or a ratio of two means, with its confidence interval.

    Attributes:
        p: the probability that values which do not differ look at least as different; NaN, like the interval, where
            one value leaves the noise unknown.
        paired: whether values were compared with those of the same seed.
    """

    mean: float
    low: float
    high: float
    p: float
    paired: bool


def effect(values: Mapping[K, float], others: Mapping[K, float], confidence: float = 0.95) -> Effect:
    """Estimate by how much values are above others: pair by pair where both have the same seeds, or else as two groups.

    Args:
        values, others: by seed.

    Reference: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
    involved", 1947.
    """
    paired = values.keys() == others.keys()
    if paired:
        differences = [value - others[seed] for seed, value in values.items()]
        mean, parts, degrees = fmean(differences), [variance_of_mean(differences)], len(differences) - 1.0
    else:
        mean = fmean(values.values()) - fmean(others.values())
        parts = [variance_of_mean(list(values.values())), variance_of_mean(list(others.values()))]
        sizes = [len(values), len(others)]
        below = sum(part**2 / (size - 1) for part, size in zip(parts, sizes) if size > 1)
        degrees = sum(parts) ** 2 / below if below > 0 else min(sizes) - 1.0
    error = math.sqrt(sum(parts))
    if math.isnan(error):
        return Effect(mean, math.nan, math.nan, math.nan, paired)
    if error == 0:
        return Effect(mean, mean, mean, float(mean == 0), paired)
    half = float(stdtrit(degrees, (1 + confidence) / 2)) * error
    return Effect(mean, mean - half, mean + half, 2 * float(stdtr(degrees, -abs(mean) / error)), paired)


def variance_of_mean(values: Sequence[float]) -> float:
    """Estimate the variance of the mean of independent values; NaN for one."""
    return variance(values) / len(values) if len(values) > 1 else math.nan


def ratio_of(values: Mapping[K, float], others: Mapping[K, float]) -> Effect:
    """Estimate how many times others values are, as `effect` of their logarithms."""
    ours, theirs = ({seed: math.log(value) for seed, value in group.items()} for group in (values, others))
    found = effect(ours, theirs)
    return Effect(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.p, found.paired)


def holm(ps: Sequence[float]) -> list[float]:
    """Raise the p of several tests, so that the chance of any false finding stays below what each is held against.

    NaNs are tests that were not made; they stay, and do not count.

    Reference: S. Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    made = sorted((p, index) for index, p in enumerate(ps) if not math.isnan(p))
    corrected, least = list(ps), 0.0
    for rank, (p, index) in enumerate(made):
        least = max(least, min(1.0, p * (len(made) - rank)))
        corrected[index] = least
    return corrected
