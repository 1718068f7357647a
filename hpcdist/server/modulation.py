"""How much less a stale gradient counts: the factors by which the learning rate is modulated.

References: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
systematic study", 2016 (average); Wei Zhang, Suyog Gupta, Xiangru Lian, Ji Liu, "Staleness-aware async-SGD for
distributed deep learning", 2016 (per-gradient).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from hpcdist.errors import UnknownNameError

Rule = Literal["none", "average", "per-gradient", "plus-one", "exponential"]
RULES: tuple[str, ...] = get_args(Rule)


def factor(rule: str, staleness: int, *, expected: float = 1.0, decay: float = 0.1) -> float:
    """The factor of the learning rate for a gradient of that staleness τ, in updates.

    none: 1. average: 1/max(1, expected), whatever this gradient's own staleness. per-gradient: 1/max(1, τ).
    plus-one: 1/(τ + 1). exponential: exp(−decay τ).

    Args:
        expected: the mean staleness that the protocol leads to; n for n-softsync.
        decay: k of the exponential rule.

    Raises:
        UnknownNameError: no such rule.
    """
    if rule == "none":
        return 1.0
    if rule == "average":
        return 1.0 / max(1.0, expected)
    if rule == "per-gradient":
        return 1.0 / max(1, staleness)
    if rule == "plus-one":
        return 1.0 / (staleness + 1)
    if rule == "exponential":
        return math.exp(-decay * staleness)
    raise UnknownNameError("modulation", rule, RULES)
