"""The structure of a topology's graph: the two sides of a bipartite one, and a spanning tree."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology


def two_sides(topology: Topology) -> tuple[frozenset[int], frozenset[int]]:
    """Split the ranks of a bipartite graph into its two sides: neighbours are on different sides.

    Rank 0 is on the first side, and so is a rank without neighbours.

    Args:
        topology: static and symmetric.

    Raises:
        ConfigError: the graph has an odd cycle, which the message names.
    """
    graph = nx.Graph((a, b) for a in range(topology.size) for b in topology.in_neighbours(a, 0) if a != b)
    graph.add_nodes_from(range(topology.size))
    if not nx.is_bipartite(graph):
        odd = next(cycle for cycle in nx.cycle_basis(graph, min(graph)) if len(cycle) % 2)
        raise ConfigError(
            f"the topology must have no odd cycle; got {'-'.join(map(str, [*odd, odd[0]]))}, of {len(odd)} ranks. Take "
            "one whose ranks fall into two sides, such as bipartite, or a ring of an even number."
        )
    second: set[int] = set()
    for part in nx.connected_components(graph):
        first = nx.single_source_shortest_path_length(graph, min(part))
        second |= {rank for rank, distance in first.items() if distance % 2}
    return frozenset(set(graph) - second), frozenset(second)


def spanning_tree(topology: Topology, ranks: Sequence[int] | None = None) -> list[list[int]]:
    """Find a tree that takes a message of any rank to every other exactly once, breadth first from the first rank.

    Args:
        ranks: the ranks in the tree; all by default. Parts of the graph that are cut off because ranks are missing
            are linked to the first rank.

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
