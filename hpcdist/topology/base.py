"""The interface of all topologies: neighbours with their weights, and the mixing matrix that these make up."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from hpcdist.errors import ConfigError


class Topology(abc.ABC):
    """The mixing matrix W of each step: xᵢ ← Σⱼ Wᵢⱼ xⱼ.

    Subclasses are final, one per module; the module's name is the topology's. Options are keyword-only. A topology
    communicates nothing: all ranks compute the same neighbours and weights.

    Args:
        size: number of ranks p, at least 1.

    Attributes:
        size: number of ranks p.
        period: steps after which the matrices repeat: 1 where they are all the same; None where they are drawn.
        symmetric: W is symmetric at every step, as D-PSGD needs it.
        doubly_stochastic: rows and columns of W sum to 1. Else columns alone do, and only push-sum finds the mean.
        complete: each rank sends to every other one at every step.

    Raises:
        ConfigError: `size` is no positive integer.

    Reference: Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can decentralized algorithms
    outperform centralized algorithms? A case study for decentralized parallel stochastic gradient descent", 2017, for
    W; Mahmoud Assran, Nicolas Loizou, Nicolas Ballas, Mike Rabbat, "Stochastic gradient push for distributed deep
    learning", 2019, for column-stochastic W that change from step to step.
    """

    symmetric: ClassVar[bool]
    doubly_stochastic: ClassVar[bool] = True
    complete: ClassVar[bool] = False
    period: int | None = 1

    def __init__(self, size: int):
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"the number of ranks must be an integer of at least 1; got {size!r}. Check it.")
        self.size = size

    @property
    def static(self) -> bool:
        """Tell whether W is the same at every step."""
        return self.period == 1

    @abc.abstractmethod
    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        """Weigh the ranks that `rank` receives parameters from at a step: row `rank` of W, without its zeros.

        Args:
            rank: from 0 to size − 1.
            step: counts from 0.

        Returns:
            {j: W[rank, j]} for these ranks j, itself included, ascending.
        """

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        """Weigh the ranks that `rank` sends its parameters to at a step: column `rank` of W, without its zeros.

        Args:
            rank: from 0 to size − 1.
            step: counts from 0.

        Returns:
            {i: W[i, rank]} for these ranks i, itself included, ascending.
        """
        if self.symmetric:
            return self.in_neighbours(rank, step)
        rows = ((i, self.in_neighbours(i, step)) for i in range(self.size))
        return {i: row[rank] for i, row in rows if rank in row}

    def matrix(self, step: int = 0) -> np.ndarray:
        """Return W at `step`: float64, shape (size, size)."""
        weights = np.zeros((self.size, self.size))
        for rank in range(self.size):
            for peer, weight in self.in_neighbours(rank, step).items():
                weights[rank, peer] = weight
        return weights


def uniform(ranks: Iterable[int]) -> dict[int, float]:
    """Give the distinct ones among `ranks` equal weights, ascending."""
    distinct = sorted(set(ranks))
    return dict.fromkeys(distinct, 1 / len(distinct))


class Circulant(Topology):
    """A circulant graph: rank i sends to i + d (mod p) for each distance d, with equal weights. Doubly stochastic."""

    @abc.abstractmethod
    def distances(self, step: int) -> Sequence[int]:
        """List the distances from a rank to those it sends to at a step, 0 (itself) included."""

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank - distance) % self.size for distance in self.distances(step))

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank + distance) % self.size for distance in self.distances(step))
