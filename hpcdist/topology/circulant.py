"""Topologies in which all ranks look alike: each sends to the ranks at the same distances from it."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from hpcdist.topology.base import Topology, uniform


class Circulant(Topology):
    """Rank i sends to i + d (mod p) for each distance d, with equal weights: W is circulant, so doubly stochastic."""

    @abc.abstractmethod
    def distances(self, step: int) -> Sequence[int]:
        """From a rank to those it sends to, 0 included."""

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank - distance) % self.size for distance in self.distances(step))

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank + distance) % self.size for distance in self.distances(step))
