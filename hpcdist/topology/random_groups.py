"""Random groups: at every step the ranks are dealt into groups of equal size, inside which all average."""

from __future__ import annotations

from typing import final

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology, random_order, uniform


@final
class RandomGroups(Topology):
    """All ranks in groups of `group`, drawn anew from (seed, step); equal weights, group − 1 messages.

    All ranks draw the same groups. With groups of two each step multiplies the expected squared distance from the mean
    by (p − 2)/(2(p − 1)), as a random permutation does, and W is symmetric.

    Args:
        size: number of ranks.
        group: ranks in a group, which must divide their number.
        seed: of the draw, at least 0.

    Raises:
        ConfigError: `group` does not divide the number of ranks, or `seed` is negative.

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
                f"group must divide the number of ranks, {size}; got {group}. Take another group, or other ranks."
            )
        if seed < 0:
            raise ConfigError(f"seed must be at least 0; got {seed}. Numpy takes no negative one.")
        self.group, self.seed = group, seed

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        order, place = random_order(self.size, self.seed, step)
        first = place[rank] // self.group * self.group
        return uniform(order[first : first + self.group])
