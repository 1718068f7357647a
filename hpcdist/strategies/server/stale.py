"""Count gradients for less that are stale, and refuse those that are too stale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field

from hpcdist.strategies.common.state import Entry, dropped, part
from hpcdist.strategies.server.modulation import MeanStaleness, Rule, factor
from hpcdist.strategies.server.policy import Held, Policy
from hpcdist.strategies.server.strategy import ServerStrategy


class StaleConfig(ServerStrategy.Config):
    """Options of servers of gradients that may be stale."""

    overlap: bool = Field(
        False, description="compute the next gradient while the last one travels: n more updates of staleness"
    )
    modulation: Rule = Field("none", description="how the learning rate falls with staleness")
    decay: float = Field(0.1, ge=0, description="k of the exponential modulation exp(-k * staleness)")
    modulation_window: int = Field(
        100, ge=1, description="gradients over which modulation measured takes the mean staleness: the last applied"
    )
    max_staleness: int | None = Field(None, ge=0, description="drop, and count, gradients that are staler; or none")


class StalePolicy(Policy):
    """Let every worker go on at once, and modulate the learning rate by the staleness of its gradient.

    Args:
        expected: the mean staleness, about, to which the protocol leads.
    """

    waits = False

    def __init__(self, config: StaleConfig, expected: float):
        self._config, self._expected = config, expected
        self.measured = MeanStaleness(config.modulation_window)

    def may_go(self, gradient: Held, active: Sequence[int]) -> bool:
        return True

    def arrived(self, source: int, staleness: int) -> str | None:
        most = self._config.max_staleness
        if most is None or staleness <= most:
            return None
        return f"dropped: a gradient of rank {source} was {staleness} updates old, max_staleness is {most}"

    def factor(self, staleness: int) -> float:
        if self._config.modulation == "none":
            return 1.0
        known = {"expected": self._expected, "measured": self.measured.value, "decay": self._config.decay}
        return factor(self._config.modulation, staleness, **known)

    def updated(self, staleness: Sequence[int]) -> None:
        self.measured.note(staleness)

    def entries(self) -> Iterable[Entry]:
        return part("measured", self.measured, dropped([]))  # another number of ranks measures anew
