"""Means, differences and ratios over seeds, with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)  # a seed
I = TypeVar("I", bound="Interval")  # noqa: E741

MIN_SEEDS = 3  # for an interval and a p: two values that happen to be equal would show no noise at all
SYMMETRIC = 1e-6  # relative difference of an interval's halves, which rounding leaves


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval, whose ends are NaN where fewer than MIN_SEEDS values leave it unknown."""

    mean: float
    low: float = math.nan
    high: float = math.nan

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_symmetric(self) -> bool:
        return math.isclose(self.mean - self.low, self.high - self.mean, rel_tol=SYMMETRIC)

    def clipped(self: I, least: float, most: float) -> I:
        """Return the same with an interval that lies between two bounds, such as 0 and 1 of a share."""
        return replace(self, low=max(self.low, least), high=min(self.high, most))  # NaN stays

    def scaled(self, factor: float) -> Interval:
        return Interval(factor * self.mean, factor * self.low, factor * self.high)

    def __format__(self, spec: str) -> str:
        mean = f"{self.mean:{spec}}"
        if math.isnan(self.low):
            return mean
        if self.low < self.high and not self.is_symmetric:
            return f"{mean} ({self.low:.3g} to {self.high:.3g})"
        return f"{mean} ± {self.half:{spec.lstrip('+')}}"


@dataclass(frozen=True)
class Effect(Interval):
    """A difference or a ratio of two means, with its confidence interval.

    Attributes:
        p: the probability that values which do not differ look at least as different; NaN, like the interval, where
            fewer than MIN_SEEDS values leave the noise unknown.
        paired: whether values were compared with those of the same seed.
    """

    p: float = math.nan
    paired: bool = False


def interval(values: Sequence[float], confidence: float = 0.95, *, least_variance: float = 0.0) -> Interval:
    """Estimate the mean of independent values and its confidence interval, as of normally distributed ones.

    Args:
        least_variance: of one value, where more is known of it than the values show.

    Reference: Student, "The probable error of a mean", 1908.
    """
    low, high, _ = _students(fmean(values), _variance(values, least_variance), len(values) - 1.0, confidence)
    return Interval(fmean(values), low, high)


def geometric(values: Sequence[float]) -> Interval:
    """Estimate the geometric mean of positive values: the mean of their logarithms, as ratios of times are of these."""
    logs = interval([math.log(value) for value in values])
    return Interval(*map(math.exp, (logs.mean, logs.low, logs.high)))


def first_reaching(moments: Iterable[tuple[T, float]], target: float, higher_is_better: bool) -> T | None:
    """Find the first moment whose value reaches a target; None where none does."""
    sign = 1 if higher_is_better else -1
    return next((moment for moment, value in moments if sign * value >= sign * target), None)


def effect(
    values: Mapping[K, float], others: Mapping[K, float], confidence: float = 0.95, *, least_variance: float = 0.0
) -> Effect:
    """Estimate by how much values are above others: pair by pair where both have the same seeds, or else as two groups.

    Args:
        values, others: by seed.
        least_variance: of the difference of two values, where more is known of it than the values show.

    Reference: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
    involved", 1947.
    """
    paired = values.keys() == others.keys()
    if paired:
        differences = [value - others[seed] for seed, value in values.items()]
        mean, error, degrees = fmean(differences), _variance(differences, least_variance), len(differences) - 1.0
    else:
        mean = fmean(values.values()) - fmean(others.values())
        groups = [list(values.values()), list(others.values())]
        parts = [_variance(group, least_variance / 2) for group in groups]
        below = sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups) if len(group) > 1)
        error = sum(parts)
        degrees = error**2 / below if below > 0 else min(map(len, groups)) - 1.0
    low, high, p = _students(mean, error, degrees, confidence)
    return Effect(mean, low, high, p, paired)


def ratio_of(values: Mapping[K, float], others: Mapping[K, float]) -> Effect:
    """Estimate how many times others values are, as `effect` of their logarithms."""
    ours, theirs = ({seed: math.log(value) for seed, value in group.items()} for group in (values, others))
    found = effect(ours, theirs)
    return replace(found, mean=math.exp(found.mean), low=math.exp(found.low), high=math.exp(found.high))


def _variance(values: Sequence[float], least: float) -> float:
    """Estimate the variance of the mean of independent values; NaN for fewer than MIN_SEEDS."""
    return max(variance(values), least) / len(values) if len(values) >= MIN_SEEDS else math.nan


def _students(mean: float, error: float, degrees: float, confidence: float) -> tuple[float, float, float]:
    """Return the ends of the confidence interval of a mean with this variance, and the p of its distance from 0."""
    if math.isnan(error):
        return math.nan, math.nan, math.nan
    if error == 0:  # of values that a rule computes, such as virtual seconds: there is no noise
        return mean, mean, float(mean == 0)
    from scipy.special import stdtr, stdtrit  # scipy.stats, whose t calls these, takes half a second to import

    half = float(stdtrit(degrees, (1 + confidence) / 2)) * math.sqrt(error)
    return mean - half, mean + half, 2 * float(stdtr(degrees, -abs(mean) / math.sqrt(error)))


def binomial_variance(share: float, tested: int) -> float:
    """Return the variance of a share of so many samples: of those that are right, or that one model alone gets right.

    Two more are taken as right, and two as wrong, so that it is not 0 where none is.

    Reference: A. Agresti, B. A. Coull, "Approximate is better than 'exact' for interval estimation of binomial
    proportions", 1998.
    """
    near = (share * tested + 2) / (tested + 4)
    return near * (1 - near) / tested


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
