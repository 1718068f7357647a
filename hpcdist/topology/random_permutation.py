"""Random permutation: at every step each rank sends to one random rank, and receives from one."""

from __future__ import annotations

from typing import final

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology, random_order, uniform


@final
class RandomPermutation(Topology):
    """All ranks in a circle, in an order drawn from (seed, step): each sends to the next; weights 1/2, one message.

    All ranks draw the same order. Each step multiplies the expected squared distance from the mean by
    (p − 2)/(2(p − 1)), less than half for any p.

    Args:
        size: number of ranks.
        seed: of the order, at least 0.

    Raises:
        ConfigError: `seed` is negative.

    Reference: Stephen Boyd, Arpita Ghosh, Balaji Prabhakar, Devavrat Shah, "Randomized gossip algorithms", 2006, for
    convergence by E[WᵀW]; here no rank is drawn twice, so that nobody waits.
    """

    symmetric = False
    period = None

    def __init__(self, size: int, *, seed: int = 0):
        super().__init__(size)
        if seed < 0:
            raise ConfigError(f"seed must be at least 0; got {seed}. Numpy takes no negative one.")
        self.seed = seed

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        order, place = random_order(self.size, self.seed, step)
        return uniform((rank, order[place[rank] - 1]))

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        order, place = random_order(self.size, self.seed, step)
        return uniform((rank, order[(place[rank] + 1) % self.size]))
