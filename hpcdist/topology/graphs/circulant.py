"""Circulant topologies: each rank sends to the ranks at the same distances from it."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from hpcdist.topology.base import Topology, uniform


class Circulant(Topology):
    """A circulant graph: rank i sends to i + d (mod p) for each distance d, with equal weights. Doubly stochastic."""

    @abc.abstractmethod
    def distances(self, step: int) -> Sequence[int]:
        """List the distances from a rank to those it sends to at a step, 0 (itself) included."""

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank - distance) % self.size for distance in self.distances(step))

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank + distance) % self.size for distance in self.distances(step))
