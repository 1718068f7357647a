"""A spanning tree of a topology's graph, along which what one rank sends reaches every other exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hpcdist.topology.base import Topology


def spanning_tree(topology: Topology, ranks: Sequence[int] | None = None) -> list[list[int]]:
    """Each rank's neighbours in the tree, ascending: breadth first from the first rank, along the links of every step.

    Args:
        ranks: those that are in the tree; default all. What the first one can't reach without the others is linked to
            it, piece by piece. The same on all ranks.
    """
    ranks = range(topology.size) if ranks is None else ranks
    found: list[list[int]] = [[] for _ in range(topology.size)]
    reached: set[int] = set()
    for root in ranks:
        if root in reached:
            continue
        if reached:
            _link(found, ranks[0], root)
        reached.add(root)
        waiting = deque([root])
        while waiting:
            rank = waiting.popleft()
            steps = range(topology.period or 1)
            for peer in sorted({peer for step in steps for peer in topology.out_neighbours(rank, step)}):
                if peer in ranks and peer not in reached:
                    reached.add(peer)
                    waiting.append(peer)
                    _link(found, rank, peer)
    return [sorted(peers) for peers in found]


def _link(found: list[list[int]], a: int, b: int) -> None:
    found[a].append(b)
    found[b].append(a)
