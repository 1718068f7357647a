"""The interface of all topologies: neighbours with their weights, which are the rows of the mixing matrix."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np

from hpcdist.errors import ConfigError


class Topology(abc.ABC):
    """The mixing matrix W of each step: xᵢ ← Σⱼ Wᵢⱼ xⱼ.

    Subclasses are final, one per module, and named after it. Options are keyword-only. A topology does not communicate:
    all ranks compute the same neighbours and weights.

    Args:
        size: number of ranks p, at least 1.

    Attributes:
        size: number of ranks p.
        period: steps after which the matrices repeat; 1 if they are all the same, None if they are random.
        symmetric: W is symmetric at every step, as D-PSGD needs it.
        doubly_stochastic: rows and columns of W sum to 1. Otherwise only columns do, and only push-sum finds the mean.
        complete: each rank sends to every other one at every step.

    Raises:
        ConfigError: `size` is not a positive integer.

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
        """Whether W is the same at every step."""
        return self.period == 1

    @abc.abstractmethod
    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        """Return the ranks from which `rank` receives at a step (from 0), with their weights.

        Returns:
            {j: W[rank, j]} without zeros, ascending, with `rank` itself.
        """

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        """Return the ranks to which `rank` sends at a step (from 0), with their weights.

        Returns:
            {i: W[i, rank]} without zeros, ascending, with `rank` itself.
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
    """Return equal weights for the distinct ranks, ascending."""
    distinct = sorted(set(ranks))
    return dict.fromkeys(distinct, 1 / len(distinct))


@lru_cache(maxsize=8)
def random_order(size: int, seed: int, step: int) -> tuple[list[int], list[int]]:
    """Draw an order of the ranks from (seed, step); return it with each rank's position in it."""
    order = np.random.default_rng([seed, step]).permutation(size)
    return order.tolist(), np.argsort(order).tolist()


class Circulant(Topology):
    """The base of circulant graphs: rank i sends to i + d (mod p) for each distance d, with equal weights."""

    @abc.abstractmethod
    def distances(self, step: int) -> Sequence[int]:
        """Return the distances to the ranks that a rank sends to at a step, 0 (itself) included."""

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank - distance) % self.size for distance in self.distances(step))

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank + distance) % self.size for distance in self.distances(step))
