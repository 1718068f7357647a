"""Quantiles of magnitudes, estimated from a sample, and the largest elements, found with their help."""

from __future__ import annotations

from math import sqrt

import numpy as np

from hpcdist.compress.coding import sparse

_CELLS = 1 << 16
_DEVIATIONS = 3  # of the sample, by which more elements than wanted are looked at: seldom are they too few


class Sample:
    """Estimate the bound that a given part of a vector's magnitudes exceeds, each time from another random sample.

    Of each of 2^16 equal cells or more an element is drawn at random: whatever the shapes of the matrices that lie in
    the vector, rows and columns are met alike. With m elements drawn, the part that is found above the bound is off by
    about 1/√(m · part), relatively. A vector of fewer than 2^17 elements is looked at whole.
    """

    def __init__(self, count: int):
        self._stride = max(1, count // _CELLS)
        self._starts = np.arange(0, count - self._stride + 1, self._stride)
        self.drawn = 0  # samples so far

    def bound(self, values: np.ndarray, part: float) -> float:
        """Estimate the bound that about `part` of the magnitudes exceed; 0 where all may."""
        sample = np.abs(values if self._stride == 1 else values[self._positions()])
        place = len(sample) - max(1, round(part * len(sample))) - 1
        return float(np.partition(sample, place)[place]) if place >= 0 else 0.0

    def largest(self, values: np.ndarray, size: int) -> np.ndarray:
        """Find the indices of the `size` largest magnitudes, ascending; of equal ones the first, and no zeros."""
        part = size / len(values)
        if self._stride > 1:
            part *= 1 + _DEVIATIONS / sqrt(size / self._stride)
        bound = self.bound(values, part)
        indices = sparse.above(values, bound)
        while len(indices) < size and bound > 0:  # an unlucky sample, or many elements as large as the bound
            part *= 4
            bound = self.bound(values, part)
            indices = sparse.above(values, bound)
        if len(indices) <= size:
            return indices
        magnitude = np.abs(values[indices])
        least = np.partition(magnitude, len(indices) - size)[len(indices) - size]
        kept = magnitude > least
        kept[np.flatnonzero(magnitude == least)[: size - np.count_nonzero(kept)]] = True
        return indices[kept]

    def _positions(self) -> np.ndarray:
        self.drawn += 1
        return self._starts + np.random.default_rng(self.drawn).integers(self._stride, size=len(self._starts))
