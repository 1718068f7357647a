"""A spanning tree of a topology's graph, along which a message of one rank reaches every other exactly once."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from hpcdist.topology.base import Topology


def spanning_tree(topology: Topology, ranks: Sequence[int] | None = None) -> list[list[int]]:
    """Find a spanning tree, breadth first from the first rank, along the links of every step.

    Args:
        ranks: those in the tree; default all. Parts of the graph that the first one can't reach without the other
            ranks are linked to it.

    Returns:
        Each rank's neighbours in the tree, ascending; the same on all ranks.
    """
    ranks = range(topology.size) if ranks is None else ranks
    left = nx.DiGraph()
    left.add_nodes_from(ranks)
    for step in range(topology.period or 1):
        left.add_edges_from((a, b) for a in ranks for b in topology.out_neighbours(a, step) if b in ranks)
    tree = nx.empty_graph(topology.size)
    for root in ranks:
        if root in left:
            links = list(nx.bfs_edges(left, root, sort_neighbors=sorted))
            tree.add_edges_from(links if root == ranks[0] else [(ranks[0], root), *links])
            left.remove_nodes_from([root, *(reached for _, reached in links)])
    return [sorted(tree[rank]) for rank in range(topology.size)]
