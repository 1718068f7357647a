"""The interface of topologies: each rank's neighbours with their weights, the rows of the mixing matrix W."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np

from hpcdist.errors import ConfigError


class Topology(abc.ABC):
    """Defines the averages of a step by the mixing matrix W in xᵢ ← Σⱼ Wᵢⱼ xⱼ.

    xᵢ are the parameters of rank i. A topology does not communicate: all ranks compute the same neighbours and
    weights. To add one, write a final subclass in a module of its name, with keyword-only options.

    Args:
        size: number of ranks p, at least 1.

    Attributes:
        size: number of ranks p.
        period: number of steps after which W repeats; 1 if W never changes, None if it is random.
        symmetric: W is symmetric at every step, a requirement of D-PSGD.
        doubly_stochastic: rows and columns of W sum to 1. If only columns do, only push-sum converges to the mean.
        complete: each rank sends to every other rank at every step.

    Raises:
        ConfigError: `size` is not a positive integer.

    Example:
        >>> from hpcdist.topology import load
        >>> load("ring")(size=5).out_neighbours(rank=0, step=0)  # {rank: weight}
        {0: 0.333..., 1: 0.333..., 4: 0.333...}

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
            raise ConfigError(f"size must be an integer of at least 1; got {size!r}. Pass the number of ranks.")
        self.size = size

    @property
    def static(self) -> bool:
        """Return whether W is the same at every step."""
        return self.period == 1

    @abc.abstractmethod
    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        """Return the weights of the ranks from which `rank` receives at `step` (0 is the first).

        Returns:
            {j: W[rank, j]} for nonzero weights, sorted by j, `rank` itself included.
        """

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        """Return the weights at the ranks to which `rank` sends at `step` (0 is the first).

        Returns:
            {i: W[i, rank]} for nonzero weights, sorted by i, `rank` itself included.
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
    """Return equal weights that sum to 1 for the distinct ranks, sorted."""
    distinct = sorted(set(ranks))
    return dict.fromkeys(distinct, 1 / len(distinct))


@lru_cache(maxsize=8)
def random_order(size: int, seed: int, step: int) -> tuple[list[int], list[int]]:
    """Shuffle the ranks, seeded by (seed, step); return the order and each rank's position in it."""
    order = np.random.default_rng([seed, step]).permutation(size)
    return order.tolist(), np.argsort(order).tolist()


class Circulant(Topology):
    """Base class of circulant graphs: rank i sends to i + d (mod p) for each distance d, with equal weights."""

    @abc.abstractmethod
    def distances(self, step: int) -> Sequence[int]:
        """Return the distances d at `step`, 0 (the rank itself) included."""

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank - distance) % self.size for distance in self.distances(step))

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return uniform((rank + distance) % self.size for distance in self.distances(step))
