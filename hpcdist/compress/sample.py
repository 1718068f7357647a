"""Quantiles of magnitudes, estimated from a sample."""

from __future__ import annotations

import numpy as np

_SIZE = 1 << 16


class Sample:
    """Estimates above which bound a given part of a vector's magnitudes lies; each time from other elements.

    With m elements sampled, the part that is found above the bound is off by about 1/√(m · part), relatively.
    """

    def __init__(self, count: int):
        self._stride = max(1, count // _SIZE)
        self.drawn = 0  # samples so far

    def bound(self, values: np.ndarray, part: float) -> float:
        """The bound that about `part` of the magnitudes exceed; 0 where all do."""
        # A stride that shares no factor with rows of weights would be better still; a moving start does as well.
        sample = np.abs(values[self.drawn % self._stride :: self._stride])
        self.drawn += 1
        wanted = round(part * len(sample))
        if wanted >= len(sample):
            return 0.0
        place = len(sample) - max(1, wanted) - 1
        return float(np.partition(sample, place)[place]) if place >= 0 else 0.0
