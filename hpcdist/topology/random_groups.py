"""Random groups: at every step the ranks are split at random into groups of equal size, which average."""

from __future__ import annotations

from typing import final

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology, random_order, uniform


@final
class RandomGroups(Topology):
    """Average inside random groups of `group` ranks, sampled at every step; equal weights, group − 1 messages.

    All ranks sample the same groups, from (seed, step). With groups of two each step multiplies the expected squared
    distance from the mean by (p − 2)/(2(p − 1)) for p ranks, like a random permutation, and W is symmetric.

    Args:
        size: number of ranks, a multiple of `group`.
        group: ranks per group.
        seed: random seed, at least 0.

    Raises:
        ConfigError: `group` does not divide the number of ranks, or `seed` is negative.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dpsgd", topology={"name": "random_groups", "group": 2})

    Reference: Stephen Boyd, Arpita Ghosh, Balaji Prabhakar, Devavrat Shah, "Randomized gossip algorithms", 2006, for
    pairs; Jari Kolehmainen, Nikolay Blagoev, John Donaghy, Oğuzhan Ersoy, Christopher Nies, "NoLoCo: no-all-reduce low
    communication training method for large models", 2025, for groups.
    """

    symmetric = True
    period = None

    def __init__(self, size: int, *, group: int = 2, seed: int = 0):
        super().__init__(size)
        if group < 1 or (size > 1 and size % group):
            raise ConfigError(
                f"group must divide the number of ranks, {size}; got {group}. Change group, or the number of ranks."
            )
        if seed < 0:
            raise ConfigError(f"seed must be at least 0; got {seed}. NumPy refuses negative seeds.")
        self.group, self.seed = group, seed

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        order, position = random_order(self.size, self.seed, step)
        first = position[rank] // self.group * self.group
        return uniform(order[first : first + self.group])
