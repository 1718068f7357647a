"""The two sides of a bipartite graph: ranks of one side have neighbours on the other only."""

from __future__ import annotations

from collections import deque

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology


def two_sides(topology: Topology) -> tuple[frozenset[int], frozenset[int]]:
    """Split the ranks of a bipartite graph into its two sides, that of rank 0 first.

    A rank without neighbours is on the first side.

    Args:
        topology: static and symmetric.

    Raises:
        ConfigError: there is an odd cycle, which it names.
    """
    before: dict[int, int | None] = {}  # in the breadth-first tree
    side: dict[int, int] = {}
    for first in range(topology.size):
        if first in side:
            continue
        before[first], side[first] = None, 0
        waiting = deque([first])
        while waiting:
            rank = waiting.popleft()
            for peer in topology.in_neighbours(rank, 0):
                if peer not in side:
                    before[peer], side[peer] = rank, 1 - side[rank]
                    waiting.append(peer)
                elif peer != rank and side[peer] == side[rank]:
                    raise ConfigError(_odd(_cycle(before, rank, peer)))
    return tuple(frozenset(rank for rank in side if side[rank] == which) for which in (0, 1))


def _cycle(before: dict[int, int | None], a: int, b: int) -> list[int]:
    """List the ranks of the cycle that an edge from b to a closes: up the tree from a, down to b, and to a."""
    up, down = _path_to_root(before, a), _path_to_root(before, b)
    while len(up) > 1 and len(down) > 1 and up[-2] == down[-2]:
        up.pop()
        down.pop()
    return [*up, *down[-2::-1], a]


def _path_to_root(before: dict[int, int | None], rank: int) -> list[int]:
    path = [rank]
    while (rank := before[rank]) is not None:
        path.append(rank)
    return path


def _odd(cycle: list[int]) -> str:
    return (
        f"the topology must have no odd cycle; got {'-'.join(map(str, cycle))}, of {len(cycle) - 1} ranks. Take one "
        "whose ranks fall into two sides, such as bipartite, or a ring of an even number."
    )
