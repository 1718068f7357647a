"""The staleness of gradients at their application."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hpcdist.errors import DataError


class StalenessLedger:
    """Counts of gradients by staleness: the clock at their application, minus the clock of their weights.

    Reference: S. Gupta, W. Zhang, F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def extend(self, staleness: Iterable[int]) -> None:
        """Count one gradient for each value.

        Raises:
            DataError: one is below 0 (a gradient of weights from the future: a clock was misread).
        """
        for value in staleness:
            if value < 0:
                raise DataError(f"staleness must be at least 0; got {value}. The clock was read out of order.")
            self._counts[value] += 1

    @property
    def gradients(self) -> int:
        """Return the number of gradients that were applied."""
        return self._counts.total()

    @property
    def mean(self) -> float:
        """Return the average staleness; 0.0 without gradients."""
        return sum(value * count for value, count in self._counts.items()) / max(1, self.gradients)

    @property
    def max(self) -> int:
        """Return the largest staleness; 0 without gradients."""
        return max(self._counts, default=0)

    @property
    def histogram(self) -> dict[int, int]:
        """Return the number of gradients per staleness, in ascending order of staleness."""
        return dict(sorted(self._counts.items()))
