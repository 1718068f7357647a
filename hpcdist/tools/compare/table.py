"""The mean of a metric over runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from hpcdist.records import Summary


def mean_metric(found: Sequence[Summary | None], metric: str) -> float | None:
    """Average a metric over runs; None where one failed, or ended with a NaN."""
    values = [math.nan if one is None else one.metrics[metric] for one in found]
    return fmean(values) if all(map(math.isfinite, values)) else None
