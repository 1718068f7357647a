"""Means, differences and ratios over seeds, with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import TypeVar

K = TypeVar("K", bound=Hashable)  # a seed
I = TypeVar("I", bound="Interval")  # noqa: E741

MIN_SEEDS = 3  # for an interval and a p-value: two equal values would suggest no noise at all
SYMMETRIC = 1e-6  # relative difference of an interval's halves due to rounding


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval; the ends are NaN with fewer than MIN_SEEDS values."""

    mean: float
    low: float = math.nan
    high: float = math.nan

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_symmetric(self) -> bool:
        return math.isclose(self.mean - self.low, self.high - self.mean, rel_tol=SYMMETRIC)

    def clipped(self: I, low_bound: float, high_bound: float) -> I:
        """Return the interval clipped to bounds, such as 0 and 1 for a share."""
        return replace(self, low=max(self.low, low_bound), high=min(self.high, high_bound))  # NaN stays NaN

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
        p: p-value of "no difference"; NaN with fewer than MIN_SEEDS values.
        paired: values of the same seed were compared.
    """

    p: float = math.nan
    paired: bool = False


def interval(values: Sequence[float], confidence: float = 0.95, *, min_variance: float = 0.0) -> Interval:
    """Estimate the mean of independent, normally distributed values, with its confidence interval (Student's t).

    Args:
        min_variance: lower bound for the variance of one value, if known.

    Reference: Student, "The probable error of a mean", 1908.
    """
    low, high, _ = _students(fmean(values), _variance(values, min_variance), len(values) - 1.0, confidence)
    return Interval(fmean(values), low, high)


def geometric(values: Sequence[float]) -> Interval:
    """Estimate the geometric mean of positive values, such as times, with its confidence interval."""
    logs = interval([math.log(value) for value in values])
    return Interval(*map(math.exp, (logs.mean, logs.low, logs.high)))


def effect(values: Mapping[K, float], others: Mapping[K, float], *, min_variance: float = 0.0) -> Effect:
    """Estimate the mean of values minus others: paired by seed if both have the same seeds, else by Welch's test.

    Args:
        values, others: by seed.
        min_variance: lower bound for the variance of the difference of two values, if known.

    Reference: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
    involved", 1947.
    """
    paired = values.keys() == others.keys()
    if paired:
        differences = [value - others[seed] for seed, value in values.items()]
        mean, mean_variance, degrees = fmean(differences), _variance(differences, min_variance), len(differences) - 1.0
    else:
        mean = fmean(values.values()) - fmean(others.values())
        groups = [list(values.values()), list(others.values())]
        variances = [_variance(group, min_variance / 2) for group in groups]
        denominator = sum(part**2 / (len(group) - 1) for part, group in zip(variances, groups) if len(group) > 1)
        mean_variance = sum(variances)
        degrees = mean_variance**2 / denominator if denominator > 0 else min(map(len, groups)) - 1.0
    low, high, p = _students(mean, mean_variance, degrees)
    return Effect(mean, low, high, p, paired)


def ratio_of(values: Mapping[K, float], others: Mapping[K, float]) -> Effect:
    """Estimate the ratio of the geometric means, values / others, as `effect` of the logarithms."""
    logs, other_logs = ({seed: math.log(value) for seed, value in group.items()} for group in (values, others))
    log_ratio = effect(logs, other_logs)
    return replace(log_ratio, mean=math.exp(log_ratio.mean), low=math.exp(log_ratio.low), high=math.exp(log_ratio.high))


def _variance(values: Sequence[float], minimum: float) -> float:
    """Estimate the variance of the mean of values whose variance is at least `minimum`; NaN if they are too few."""
    return max(variance(values), minimum) / len(values) if len(values) >= MIN_SEEDS else math.nan


def _students(mean: float, error: float, degrees: float, confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the ends of the t-interval of a mean with variance `error`, and the p-value of the hypothesis mean = 0."""
    if math.isnan(error):
        return math.nan, math.nan, math.nan
    if error == 0:  # deterministic values, such as virtual seconds, have no noise
        return mean, mean, float(mean == 0)
    from scipy.special import stdtr, stdtrit  # scipy.stats.t calls these, but takes half a second to import

    half = float(stdtrit(degrees, (1 + confidence) / 2)) * math.sqrt(error)
    return mean - half, mean + half, 2 * float(stdtr(degrees, -abs(mean) / math.sqrt(error)))


def binomial_variance(share: float, tested: int) -> float:
    """Return the variance of a share of `tested` samples, such as an accuracy.

    Two successes and two failures are added, so that the variance is not 0 for a share of 0 or 1.

    Reference: A. Agresti, B. A. Coull, "Approximate is better than 'exact' for interval estimation of binomial
    proportions", 1998.
    """
    adjusted = (share * tested + 2) / (tested + 4)
    return adjusted * (1 - adjusted) / tested


def holm(ps: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests; NaN, a test that was not possible, stays and does not count.

    Reference: S. Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    valid = sorted((p, index) for index, p in enumerate(ps) if not math.isnan(p))
    corrected, largest = list(ps), 0.0
    for position, (p, index) in enumerate(valid):
        largest = max(largest, min(1.0, p * (len(valid) - position)))
        corrected[index] = largest
    return corrected
