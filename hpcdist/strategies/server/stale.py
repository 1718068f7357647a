"""Reduce the learning rate of stale gradients, and drop gradients that are too stale.

References: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
systematic study", 2016 (average, and measured: its ⟨σ⟩); Wei Zhang, Suyog Gupta, Xiangru Lian, Ji Liu,
"Staleness-aware async-SGD for distributed deep learning", 2016 (per-gradient).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from hpcdist.config.settings import Field
from hpcdist.strategies.server.channel import ServerRequest
from hpcdist.strategies.server.gradients import Policy
from hpcdist.strategies.server.strategy import ServerStrategy

Rule = Literal["none", "average", "measured", "per-gradient", "plus-one", "exponential"]
OF_EACH_GRADIENT = ("per-gradient", "plus-one", "exponential")  # rules that use each gradient's staleness


class StaleConfig(ServerStrategy.Config):
    """Options of strategies whose gradients may be stale."""

    overlap: bool = Field(False, "compute the next gradient while the last one is sent; staleness grows by n updates")
    modulation: Rule = Field("none", "rule that reduces the learning rate by staleness")
    decay: float = Field(0.1, "k of the exponential modulation exp(-k * staleness)", ge=0)
    modulation_window: int = Field(
        100, "number of the last gradients over which modulation `measured` averages staleness", ge=1
    )
    max_staleness: int | None = Field(
        None, "drop and count gradients that are staler than this; none drops no gradient", ge=0
    )


class StalePolicy(Policy):
    """Reply to every worker immediately, and modulate the learning rate by the staleness of its gradient.

    Args:
        expected: the approximate mean staleness of the protocol; n for n-softsync.

    Attributes:
        measured: the staleness of the last `modulation_window` gradients that the server has applied. Changes only
            after an update, so that all gradients of one update have the same weight.
    """

    remembers = ("measured",)
    waits = False

    def __init__(self, config: StaleConfig, expected: float):
        self._config, self._expected = config, expected
        self.measured: list[int] = []

    def may_go(self, gradient: ServerRequest, active: Sequence[int]) -> bool:
        return True

    def arrived(self, source: int, staleness: int) -> str | None:
        limit = self._config.max_staleness
        if limit is None or staleness <= limit:
            return None
        return f"dropped: a gradient of rank {source} was {staleness} updates old, max_staleness is {limit}"

    def factor(self, staleness: int) -> float:
        """Return the factor of the learning rate for a gradient of staleness τ, in updates: exp(−kτ), or 1/..."""
        rule = self._config.modulation
        if rule == "exponential":
            return math.exp(-self._config.decay * staleness)
        last = self.measured[-self._config.modulation_window :]
        divisors = {
            "none": 1.0, "average": max(1.0, self._expected), "measured": max(1.0, sum(last) / max(1, len(last))),
            "per-gradient": max(1, staleness), "plus-one": staleness + 1,
        }  # fmt: skip
        return 1.0 / divisors[rule]

    def updated(self, staleness: Sequence[int]) -> None:
        self.measured = [*self.measured, *staleness][-self._config.modulation_window :]
