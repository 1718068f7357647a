"""A spanning tree of a topology's graph, along which what one rank sends reaches every other exactly once."""

from __future__ import annotations

from collections import deque

from hpcdist.topology.base import Topology


def spanning_tree(topology: Topology) -> list[list[int]]:
    """Each rank's neighbours in the tree, ascending: breadth first from rank 0, along the links of every step.

    Ranks that rank 0 can't reach have none. The same on all ranks.
    """
    found: list[list[int]] = [[] for _ in range(topology.size)]
    reached, waiting = {0}, deque([0])
    while waiting:
        rank = waiting.popleft()
        for peer in sorted({p for step in range(topology.period or 1) for p in topology.out_neighbours(rank, step)}):
            if peer not in reached:
                reached.add(peer)
                waiting.append(peer)
                found[rank].append(peer)
                found[peer].append(rank)
    return [sorted(peers) for peers in found]
