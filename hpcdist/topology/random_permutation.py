"""Random permutation: at every step each rank sends to one random rank and receives from another."""

from __future__ import annotations

from typing import final

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology, random_order, uniform


@final
class RandomPermutation(Topology):
    """Send to the next rank of a ring whose order is sampled at every step; weights 1/2, one message per rank.

    All ranks sample the same order, from (seed, step). Each step multiplies the expected squared distance from the mean
    by (p − 2)/(2(p − 1)) for p ranks, less than 1/2.

    Args:
        size: number of ranks.
        seed: random seed, at least 0.

    Raises:
        ConfigError: `seed` is negative.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "sgp", topology="random_permutation")

    Reference: Stephen Boyd, Arpita Ghosh, Balaji Prabhakar, Devavrat Shah, "Randomized gossip algorithms", 2006, for
    convergence by E[WᵀW]; here no rank is sampled twice per step, so no rank waits for a busy one.
    """

    symmetric = False
    period = None

    def __init__(self, size: int, *, seed: int = 0):
        super().__init__(size)
        if seed < 0:
            raise ConfigError(f"seed must be at least 0; got {seed}. NumPy refuses negative seeds.")
        self.seed = seed

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        order, position = random_order(self.size, self.seed, step)
        return uniform((rank, order[position[rank] - 1]))

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        order, position = random_order(self.size, self.seed, step)
        return uniform((rank, order[(position[rank] + 1) % self.size]))
