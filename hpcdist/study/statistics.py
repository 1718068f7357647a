"""Means and what they are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t


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
        return f"{self.mean:{spec}}" if math.isnan(self.half) else f"{self.mean:{spec}} ± {self.half:{spec}}"


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean of independent values with its confidence interval by Student's t, as of normally distributed ones.

    For what two protocols differ by, give the differences of runs of the same seed: what they share cancels.

    Reference: Student, "The probable error of a mean", 1908.
    """
    n = len(values)
    if n < 2:
        return Interval(fmean(values), math.nan)
    return Interval(fmean(values), float(t.ppf((1 + confidence) / 2, n - 1)) * stdev(values) / math.sqrt(n))
