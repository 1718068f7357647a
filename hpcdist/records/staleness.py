"""How stale the gradients were when they were applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hpcdist.errors import DataError


class StalenessLedger:
    """Counts gradients by their staleness at application: the clock then, minus that of the weights they came from.

    Reference: S. Gupta, W. Zhang, F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016.
    """

    def __init__(self, histogram: dict[int, int] | None = None):
        self._counts: Counter[int] = Counter()
        for staleness, count in (histogram or {}).items():
            self.add(staleness, count)

    def add(self, staleness: int, count: int = 1) -> None:
        """Counts `count` gradients that were `staleness` updates old.

        Raises:
            DataError: `staleness` is below 0 (a gradient of weights from the future: a clock was misread).
        """
        if staleness < 0:
            raise DataError(f"staleness must be at least 0; got {staleness}. The clock was read out of order.")
        self._counts[staleness] += count

    def extend(self, staleness: Iterable[int]) -> None:
        """Counts one gradient for each value."""
        for value in staleness:
            self.add(value)

    def merge(self, other: StalenessLedger) -> None:
        """Adds the other ledger's counts."""
        self._counts.update(other._counts)

    @property
    def gradients(self) -> int:
        """How many gradients were applied."""
        return self._counts.total()

    @property
    def mean(self) -> float:
        """Average staleness; 0.0 of no gradients."""
        return sum(value * count for value, count in self._counts.items()) / max(1, self.gradients)

    @property
    def max(self) -> int:
        """Largest staleness; 0 of no gradients."""
        return max(self._counts, default=0)

    @property
    def histogram(self) -> dict[int, int]:
        """Number of gradients per staleness, in ascending order of staleness."""
        return dict(sorted(self._counts.items()))
